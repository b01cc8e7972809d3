//! Takes over what another backend holds: tables, rows and their audit are one transaction, so a
//! move that is interrupted leaves nothing behind.

use super::audit_source::AuditReading;
use super::driver::Driver;
use super::failure::Failure;
use super::origin::{self, ChainPlace, MoveOrigin};
use super::rows::{AccountRow, BatchRows};
use super::session::{Ask, Connector, DatabaseSession, SessionKind};
use super::{PostgresConfig, schema, seal, server, writing};
use cresset_base::{AccountId, BootId, UnixMillis, failpoint};
use cresset_ledger::audit::{self, AuditProgress, JournalHeads, RowIter};
use cresset_ledger::{JournalEntry, JournalHead, RequestKey, StateError, journal};
use cresset_store::{
    AuditReport, MoveHooks, MoveReport, MoveSource, Seal, StoreError, StoreResult, StoredBody,
};
use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::Arc;

/// Rows written in one round trip.
const BATCH: usize = 1_000;
/// Bytes of answers that count as much as one row: a batch of them takes 4 MiB.
const BYTES_AS_ROW: usize = 4 << 10;

/// Counts what the accounts' answers take, once all of them are stored.
const COUNT_ANSWERS: &str = "update accounts a set answer_bytes = b.bytes from \
    (select account, sum(size)::bigint as bytes from bodies group by account) as b \
    where a.id = b.account";
/// What the planner knows of new tables, for the audit and the first batches.
const ANALYZE: &str = "analyze accounts, applications, credentials, grants, requests, entries, \
    crashes, bodies";
/// A write, so that it is certain that the commit of the move has reached the standbys, too.
const TOUCH: &str = "update meta set row = row where key = 'moved'";

/// Everything that `source` holds, where an audit read `audited`, in a database without a ledger.
pub(super) fn take_over(
    place: &PostgresConfig,
    (source, audited): (&dyn MoveSource, &AuditReport),
    now: UnixMillis,
    hooks: &MoveHooks<'_>,
) -> StoreResult<MoveReport> {
    let driver = Driver::start()?;
    let connector = Arc::new(Connector::new(place, driver.handle()));
    let session = driver.wait(async {
        let session = connector.connect(SessionKind::Auditor).await?;
        server::check(&session, place.standbys()).await?;
        schema::begin_with_tables(&session).await?;
        Ok::<_, StoreError>(session)
    })?;
    let total = source.row_count()?;
    let mut target = MoveTarget { driver: &driver, session: &session, hooks, done: 0, total };
    let answers = target.take_all(source, now)?;
    let reading = AuditReading::within(&driver, session);
    let rows = audit_of(&reading, hooks)?;
    compare(audited, &rows)?;
    let session = reading.into_session();
    driver.wait(commit(&session, &rows.heads, now, hooks))?;
    Ok(MoveReport { rows: Some(rows), answers, files: Vec::new() })
}

/// The process that had used the ledger last that was moved into this database; `None` where none
/// was.
pub(super) fn moved_from(place: &PostgresConfig) -> StoreResult<Option<BootId>> {
    super::with_session(place, async |session| {
        if !schema::has_tables(session).await? {
            return Ok(None);
        }
        schema::check(session).await?;
        let Some(origin) = origin::read(session).await? else { return Ok(None) };
        let doubts = session.doubts();
        session.script(TOUCH).await?;
        certain(session, doubts)?;
        Ok(Some(origin.boot))
    })
}

/// Stores the seal, so that the first start need not audit everything again, and commits.
async fn commit(
    session: &DatabaseSession,
    heads: &JournalHeads,
    now: UnixMillis,
    hooks: &MoveHooks<'_>,
) -> StoreResult {
    let sealed = Seal { heads: heads.clone(), fully_audited_at: now };
    seal::write(session, Some(&sealed)).await?;
    (hooks.configure)()?;
    failpoint!("store::move_configured");
    let doubts = session.doubts();
    session.script("commit").await?;
    certain(session, doubts)
}

fn certain(session: &DatabaseSession, doubts: u64) -> StoreResult {
    if session.doubts() != doubts {
        let why = "the move may not have reached the standbys: give the command again";
        return Err(Failure::lost(why).into());
    }
    Ok(())
}

fn audit_of(reading: &AuditReading<'_>, hooks: &MoveHooks<'_>) -> StoreResult<AuditReport> {
    let pace = |progress| {
        (hooks.progress)("auditing the ledger in the database", progress);
        Ok(())
    };
    let report = audit::everything(reading, &pace)?;
    match report.violations.first() {
        None => Ok(report),
        Some(violation) => Err(StoreError::Unusable(format!(
            "what arrived in the database breaks a rule of the ledger, and nothing was moved: {violation}"
        ))),
    }
}

/// The audit has compared balances with the journal; what is left is that nothing is missing.
fn compare(source: &AuditReport, moved: &AuditReport) -> StoreResult {
    for (what, expect, found) in [
        ("accounts", source.accounts, moved.accounts),
        ("credentials", source.credentials, moved.credentials),
        ("requests", source.requests, moved.requests),
        ("journal entries", source.entries, moved.entries),
    ] {
        if expect != found {
            return Err(StoreError::Unusable(format!(
                "{found} {what} arrived in the database and {expect} were to, so nothing was moved"
            )));
        }
    }
    Ok(())
}

/// The end of an account's new chain.
#[derive(Clone, Copy, Default)]
struct ChainEnd {
    head: JournalHead,
    at: UnixMillis,
}

/// The chains of the accounts, made from the one that the moved ledger has.
#[derive(Default)]
struct NewChains {
    ends: HashMap<AccountId, ChainEnd>,
    set_back: Vec<ChainPlace>,
}

impl NewChains {
    /// The same entry as the next one of its account's chain.
    fn next(&mut self, entry: JournalEntry) -> JournalEntry {
        let account = entry.account;
        let end = self.ends.entry(account).or_default();
        if entry.at < end.at {
            self.set_back.push(ChainPlace { account, sequence: end.head.sequence });
        }
        let mut entry = JournalEntry { sequence: end.head.sequence + 1, ..entry };
        entry.hash = journal::chain(&end.head, &entry);
        let head = JournalHead { sequence: entry.sequence, hash: entry.hash };
        *end = ChainEnd { head, at: entry.at };
        entry
    }
}

/// The transaction that a move fills.
struct MoveTarget<'m> {
    driver: &'m Driver,
    session: &'m DatabaseSession,
    hooks: &'m MoveHooks<'m>,
    done: u64,
    total: u64,
}

impl MoveTarget<'_> {
    /// Copies everything; answers that have expired stay where they are. Returns the number of the
    /// others.
    fn take_all(&mut self, source: &dyn MoveSource, now: UnixMillis) -> StoreResult<u64> {
        let chains = self.take_journal(source)?;
        self.take_owners(source, &chains)?;
        self.each(source.requests(), |rows, record| rows.requests.put(record.key, record))?;
        self.each(source.crashes(), |rows, (account, fingerprint, crashes)| {
            rows.crashes.put((account, fingerprint), crashes);
        })?;
        let answers = self.take_answers(source.bodies(), now)?;
        self.write_origin(source, chains, now)?;
        self.driver.wait(async {
            self.session.ask(Ask::new(COUNT_ANSWERS)).await?;
            self.session.script(ANALYZE).await
        })?;
        Ok(answers)
    }

    fn take_journal(&mut self, source: &dyn MoveSource) -> StoreResult<NewChains> {
        let mut chains = NewChains::default();
        self.each(source.entries(&JournalHeads::default()), |rows, entry| {
            rows.entries.push(chains.next(entry));
        })?;
        Ok(chains)
    }

    /// Accounts with their balances, and what they own.
    fn take_owners(&mut self, source: &dyn MoveSource, chains: &NewChains) -> StoreResult {
        let accounts = source.accounts()?.map(|account| {
            let account = account?;
            let balances = source.balances(account.id)?;
            let ChainEnd { head, at } = chains.ends.get(&account.id).copied().unwrap_or_default();
            Ok(AccountRow { account, balances, head, clock: at })
        });
        self.each(Ok(Box::new(accounts)), |rows, row| rows.accounts.put(row.account.id, row))?;
        self.each(source.applications(), |rows, row| rows.applications.put(row.id, row))?;
        self.each(source.credentials(), |rows, row| rows.credentials.put(row.id, row))?;
        self.each(source.grants(), |rows, (account, reference, granted)| {
            rows.adjustments.put((account, reference), granted);
        })
    }

    /// Writes rows in batches.
    fn each<T>(
        &mut self,
        rows: RowIter<'_, T>,
        mut put: impl FnMut(&mut BatchRows, T),
    ) -> StoreResult {
        let (mut batch, mut held) = (BatchRows::default(), 0);
        for row in rows? {
            put(&mut batch, row?);
            held += 1;
            if held == BATCH {
                self.write(writing::row_writes(&mem::take(&mut batch)), held)?;
                held = 0;
            }
        }
        self.write(writing::row_writes(&batch), held)
    }

    fn take_answers(
        &mut self,
        bodies: RowIter<'_, (RequestKey, StoredBody)>,
        now: UnixMillis,
    ) -> StoreResult<u64> {
        let (mut batch, mut weight, mut answers) = (BTreeMap::new(), 0, 0);
        let lives = |row: &Result<(RequestKey, StoredBody), StateError>| {
            row.as_ref().map_or(true, |(_, body)| now < body.expires_at)
        };
        for row in bodies?.filter(lives) {
            let (key, body) = row?;
            weight += 1 + body.stored_bytes() / BYTES_AS_ROW;
            batch.insert(key, body);
            answers += 1;
            if weight >= BATCH {
                self.write_answers(&mem::take(&mut batch))?;
                weight = 0;
            }
        }
        self.write_answers(&batch)?;
        Ok(answers)
    }

    fn write_answers(&mut self, batch: &BTreeMap<RequestKey, StoredBody>) -> StoreResult {
        let rows: Vec<_> = batch.iter().collect();
        self.write(vec![writing::body_writes(&rows)], rows.len())
    }

    fn write(&mut self, asks: Vec<Ask>, rows: usize) -> StoreResult {
        self.driver.wait(self.session.pipeline(asks))?;
        failpoint!("store::moved_rows");
        self.done += rows as u64;
        let progress = AuditProgress { done: self.done, total: self.total };
        (self.hooks.progress)("copying the ledger into the database", progress);
        Ok(())
    }

    fn write_origin(
        &self,
        source: &dyn MoveSource,
        chains: NewChains,
        now: UnixMillis,
    ) -> StoreResult {
        let head = source.heads()?.next().transpose()?.map(|(_, head)| head);
        let origin = MoveOrigin {
            boot: source.last_boot()?.unwrap_or(BootId::generate()),
            head: head.unwrap_or_default(),
            moved_at: now,
            set_back: chains.set_back,
        };
        self.driver.wait(origin::write(self.session, &origin))
    }
}

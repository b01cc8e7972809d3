//! One state of the database as the audit reads it, row by row. What stands beside the content of a
//! row is compared with it.

use super::driver::Driver;
use super::failure::Failure;
use super::keys::request_at;
use super::origin::{self, MoveOrigin};
use super::rows::{AccountRow, content, fixed};
use super::session::{Ask, Connector, DatabaseSession, QueryAnswer, SessionKind};
use super::snapshot::{by_id, by_request, entry, of_request, signed};
use super::writing;
use cresset_base::{AccountId, ApplicationId};
use cresset_ledger::audit::{AuditSource, JournalChain, JournalHeads, RowIter};
use cresset_ledger::{
    Account, Adjustment, Application, Balances, Credential, JournalEntry, JournalHead, RequestKey,
    RequestRecord, Reservation, StateError, StateResult,
};
use cresset_store::rows::grant_key;
use cresset_store::{StoreResult, StoredBody};
use std::cell::{Cell, OnceCell};
use std::iter;
use std::sync::Arc;
use tokio_postgres::Row;
use uuid::Uuid;

/// Rows fetched in one round trip.
const PAGE: &str = "1000";

const ACCOUNTS: &str = "select id, row, in_flight, trial_credited, trial_debited, trial_reserved, \
    premium_credited, premium_debited, premium_reserved, sequence, clock from accounts";
const APPLICATIONS: &str = "select id, row, account from applications";
const CREDENTIALS: &str = "select id, row, account, digest from credentials";
const GRANTS: &str = "select account, reference, row from grants";
const REQUESTS: &str = "select account, request, application, row, state, boot, ended_at, \
    credential, fingerprint from requests";
const RESERVATIONS: &str = "select account, request, application, row, attempt, boot \
    from reservations order by account, request, application";
const ALL_ENTRIES: &str = "select sequence, row, account, kind, attempt from entries \
    order by account, sequence";
const BODIES: &str = "select account, request, application, row, size from bodies";
const WRONG_SUMS: &str = "select coalesce(a.id, b.account), coalesce(a.answer_bytes, 0), \
    coalesce(b.bytes, 0) from accounts a full join (select account, sum(size)::bigint as bytes \
    from bodies group by account) as b on b.account = a.id \
    where coalesce(a.answer_bytes, 0) <> coalesce(b.bytes, 0)";
const COUNT: &str = "select (select count(*) from accounts) * 3 \
    + (select count(*) from applications) + (select count(*) from credentials) \
    + (select count(*) from grants) + (select count(*) from requests) \
    + (select count(*) from reservations) + (select count(*) from entries) \
    + (select count(*) from bodies)";

pub(super) struct AuditReading<'b> {
    driver: &'b Driver,
    session: DatabaseSession,
    /// Number of the next cursor.
    next: Cell<u64>,
    /// Where the ledger was moved from, once that was asked for.
    origin: OnceCell<Option<MoveOrigin>>,
}

impl<'b> AuditReading<'b> {
    pub(super) fn begin(driver: &'b Driver, connector: &Arc<Connector>) -> StoreResult<Self> {
        let session = driver.wait(async {
            let session = connector.connect(SessionKind::Auditor).await?;
            session.script("begin isolation level repeatable read, read only; select 1").await?;
            Ok::<_, Failure>(session)
        })?;
        Ok(Self::within(driver, session))
    }

    /// A reading in the transaction that a session has open.
    pub(super) fn within(driver: &'b Driver, session: DatabaseSession) -> Self {
        Self { driver, session, next: Cell::default(), origin: OnceCell::new() }
    }

    pub(super) fn into_session(self) -> DatabaseSession {
        self.session
    }

    pub(super) fn origin(&self) -> StateResult<Option<&MoveOrigin>> {
        if self.origin.get().is_none() {
            let found = self.driver.wait(origin::read(&self.session))?;
            return Ok(self.origin.get_or_init(|| found).as_ref());
        }
        Ok(self.origin.get().and_then(Option::as_ref))
    }

    fn ask(&self, ask: Ask) -> StateResult<QueryAnswer> {
        Ok(self.driver.wait(self.session.ask(ask))?)
    }

    /// The first row of the answer.
    fn one<T>(&self, ask: Ask, read: impl Fn(&Row) -> StateResult<T>) -> StateResult<Option<T>> {
        self.ask(ask)?.rows.first().map(read).transpose()
    }

    /// All rows of a query without parameters, fetched page by page.
    pub(super) fn all<'s, T: 's>(
        &'s self,
        query: &str,
        read: impl Fn(&Row) -> StateResult<T> + 's,
    ) -> RowIter<'s, T> {
        let cursor = format!("audited{}", self.next.replace(self.next.get() + 1));
        let declare = format!("declare {cursor} no scroll cursor for {query}");
        self.driver.wait(self.session.script(&declare)).map_err(StateError::from)?;
        let fetch = format!("fetch {PAGE} from {cursor}");
        let mut ended = false;
        let pages = iter::from_fn(move || {
            if ended {
                return None;
            }
            let page = self.driver.wait(self.session.text(&fetch));
            ended = page.as_ref().map_or(true, Vec::is_empty);
            Some(page)
        });
        Ok(Box::new(pages.flat_map(move |page| match page {
            Ok(rows) => rows.iter().map(&read).collect(),
            Err(failure) => vec![Err(failure.into())],
        })))
    }
}

impl AuditSource for AuditReading<'_> {
    fn accounts(&self) -> RowIter<'_, Account> {
        self.all(ACCOUNTS, |row| account_row(row).map(|row| row.account))
    }

    /// Those of accounts with entries.
    fn all_balances(&self) -> RowIter<'_, (AccountId, Balances)> {
        let rows = self.all(ACCOUNTS, account_row)?;
        Ok(Box::new(rows.filter_map(|row| match row {
            Ok(row) if row.head.sequence == 0 => None,
            row => Some(row.map(|row| (row.account.id, row.balances))),
        })))
    }

    fn applications(&self) -> RowIter<'_, Application> {
        self.all(APPLICATIONS, |row| {
            let application: Application = by_id(row)?;
            let same = row.get::<_, Uuid>(2) == application.account.0;
            agreeing(same, application, "an application")
        })
    }

    fn credentials(&self) -> RowIter<'_, Credential> {
        self.all(CREDENTIALS, |row| {
            let credential: Credential = by_id(row)?;
            let same = row.get::<_, Uuid>(2) == credential.account.0
                && fixed(row, 3) == Some(credential.digest);
            agreeing(same, credential, "a credential")
        })
    }

    fn grants(&self) -> RowIter<'_, (AccountId, String, Adjustment)> {
        self.all(GRANTS, |row| {
            let (account, reference) = (AccountId(row.get(0)), row.get::<_, String>(1));
            let granted = content(row, 2, &grant_key(account, &reference))?;
            Ok((account, reference, granted))
        })
    }

    fn requests(&self) -> RowIter<'_, RequestRecord> {
        self.all(REQUESTS, |row| {
            let record: RequestRecord = by_request(row)?;
            let latest = record.latest();
            let same = row.get::<_, i16>(4) == latest.state as i16
                && row.get::<_, Uuid>(5) == latest.boot.0
                && row.get::<_, Option<i64>>(6) == latest.finished_at.map(|at| signed(at.0))
                && row.get::<_, Uuid>(7) == latest.credential.0
                && fixed(row, 8) == Some(record.fingerprint)
                && request_at(row, 0) == record.key;
            agreeing(same, record, "a request")
        })
    }

    fn reservations(&self) -> RowIter<'_, Reservation> {
        self.all(RESERVATIONS, |row| {
            let reservation: Reservation = by_request(row)?;
            let same = row.get::<_, Uuid>(4) == reservation.attempt.0
                && row.get::<_, Uuid>(5) == reservation.boot.0
                && request_at(row, 0) == reservation.key;
            agreeing(same, reservation, "a reservation")
        })
    }

    fn reservations_of(&self, account: AccountId) -> RowIter<'_, Reservation> {
        const SELECT: &str = "select account, request, application, row from reservations \
            where account = $1 order by request, application";
        let rows = self.ask(Ask::new(SELECT).with(account.0))?.rows;
        Ok(Box::new(rows.into_iter().map(|row| by_request(&row))))
    }

    /// Each account has a chain of its own.
    fn chain_of(&self, account: AccountId) -> JournalChain {
        JournalChain::Account(account)
    }

    fn heads(&self) -> RowIter<'_, (JournalChain, JournalHead)> {
        let rows = self.all(ACCOUNTS, account_row)?;
        Ok(Box::new(rows.filter_map(|row| match row {
            Ok(row) if row.head.sequence == 0 => None,
            row => Some(row.map(|row| (JournalChain::Account(row.account.id), row.head))),
        })))
    }

    fn entries(&self, after: &JournalHeads) -> RowIter<'_, JournalEntry> {
        if after.iter().next().is_none() {
            return self.all(ALL_ENTRIES, |row| {
                let entry = entry(AccountId(row.get(2)), row)?;
                let same = writing::kind(&entry) == (row.get(3), row.get(4));
                agreeing(same, entry, "an entry")
            });
        }
        let after = after.clone();
        let heads = AuditSource::heads(self)?;
        let news = heads.filter_map(move |head| match head {
            Ok((chain @ JournalChain::Account(account), head)) => {
                let from = after.of(chain).sequence;
                (head.sequence != from).then_some(Ok((account, from)))
            }
            Ok((JournalChain::Shared, _)) => None,
            Err(error) => Some(Err(error)),
        });
        Ok(Box::new(news.flat_map(|chain| self.entries_of(chain))))
    }

    /// The time of a ledger in a database goes back nowhere but in what was moved here.
    fn set_back_after(&self, chain: JournalChain) -> StateResult<Vec<u64>> {
        Ok(self.origin()?.map(|origin| origin.set_back_after(chain)).unwrap_or_default())
    }

    /// The folder that was moved here may have been one of schema 1.
    fn misses_uses(&self, account: AccountId) -> StateResult<bool> {
        Ok(!self.set_back_after(JournalChain::Account(account))?.is_empty())
    }

    fn closed_parts(&self) -> RowIter<'_, ()> {
        Ok(Box::new(iter::empty()))
    }

    fn row_count(&self) -> StateResult<u64> {
        let count = self.one(Ask::new(COUNT), |row| Ok(row.get::<_, i64>(0).unsigned_abs()))?;
        Ok(count.unwrap_or_default())
    }

    fn index_rows(&self) -> RowIter<'_, ()> {
        Ok(Box::new(iter::empty()))
    }

    fn answers(&self) -> RowIter<'_, ()> {
        let answers = self.all(BODIES, |row| {
            let _: StoredBody = by_request(row)?;
            let size = row.get::<_, &[u8]>(3).len() as i64;
            agreeing(size == row.get::<_, i64>(4), (), "an answer")
        })?;
        let sums = self.all(WRONG_SUMS, |row| {
            let (account, stored, counted): (Uuid, i64, i64) = (row.get(0), row.get(1), row.get(2));
            Err(StateError::Corrupt(format!(
                "account {account} has answers of {counted} bytes, and {stored} are recorded"
            )))
        })?;
        Ok(Box::new(answers.chain(sums)))
    }

    fn account(&self, id: AccountId) -> StateResult<Option<Account>> {
        Ok(self.account_of(id)?.map(|row| row.account))
    }

    fn balances(&self, id: AccountId) -> StateResult<Balances> {
        Ok(self.account_of(id)?.map(|row| row.balances).unwrap_or_default())
    }

    fn application(&self, id: ApplicationId) -> StateResult<Option<Application>> {
        const SELECT: &str = "select id, row from applications where id = $1";
        self.one(Ask::new(SELECT).with(id.0), by_id)
    }

    fn credential_by_digest(&self, digest: &[u8; 32]) -> StateResult<Option<Credential>> {
        const SELECT: &str = "select id, row from credentials where digest = $1";
        self.one(Ask::new(SELECT).with(digest.to_vec()), by_id)
    }

    fn adjustment(&self, account: AccountId, reference: &str) -> StateResult<Option<Adjustment>> {
        const SELECT: &str = "select row from grants where account = $1 and reference = $2";
        let ask = Ask::new(SELECT).with(account.0).with(reference.to_owned());
        self.one(ask, |row| content(row, 0, &grant_key(account, reference)))
    }

    fn request(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>> {
        const SELECT: &str = "select account, request, application, row from requests \
            where account = $1 and request = $2 and application = $3";
        self.one(of_request(SELECT, key), by_request)
    }

    fn reservation(&self, key: &RequestKey) -> StateResult<Option<Reservation>> {
        const SELECT: &str = "select account, request, application, row from reservations \
            where account = $1 and request = $2 and application = $3";
        self.one(of_request(SELECT, key), by_request)
    }

    fn entry(&self, chain: JournalChain, sequence: u64) -> StateResult<Option<JournalEntry>> {
        const SELECT: &str =
            "select sequence, row from entries where account = $1 and sequence = $2";
        let JournalChain::Account(account) = chain else { return Ok(None) };
        let ask = Ask::new(SELECT).with(account.0).with(signed(sequence));
        self.one(ask, |row| entry(account, row))
    }

    fn recent_balances(&self, account: AccountId) -> StateResult<Option<Balances>> {
        let last = self.entry_of(account, u64::MAX)?;
        Ok(Some(last.map(|last| last.after).unwrap_or_default()))
    }

    fn entry_of(&self, account: AccountId, until: u64) -> StateResult<Option<JournalEntry>> {
        const SELECT: &str = "select sequence, row from entries \
            where account = $1 and sequence <= $2 order by sequence desc limit 1";
        let ask = Ask::new(SELECT).with(account.0).with(signed(until));
        self.one(ask, |row| entry(account, row))
    }
}

impl AuditReading<'_> {
    fn account_of(&self, id: AccountId) -> StateResult<Option<AccountRow>> {
        const SELECT: &str = "select id, row from accounts where id = $1";
        self.one(Ask::new(SELECT).with(id.0), by_id)
    }

    /// The entries of a chain after a sequence, page by page.
    fn entries_of(
        &self,
        chain: StateResult<(AccountId, u64)>,
    ) -> Box<dyn Iterator<Item = StateResult<JournalEntry>> + '_> {
        const SELECT: &str = "select sequence, row from entries \
            where account = $1 and sequence > $2 order by sequence limit 1000";
        let (account, mut after) = match chain {
            Ok(chain) => chain,
            Err(error) => return Box::new(iter::once(Err(error))),
        };
        let mut ended = false;
        Box::new(
            iter::from_fn(move || {
                if ended {
                    return None;
                }
                let page = self.ask(Ask::new(SELECT).with(account.0).with(signed(after)));
                let last = page.as_ref().ok().and_then(|page| page.rows.last());
                ended = last.is_none();
                after = last.map_or(after, |row| row.get::<_, i64>(0).unsigned_abs());
                Some(page)
            })
            .flat_map(move |page| match page {
                Ok(page) => page.rows.iter().map(|row| entry(account, row)).collect(),
                Err(error) => vec![Err(error)],
            }),
        )
    }
}

/// A row of `ACCOUNTS`.
fn account_row(row: &Row) -> StateResult<AccountRow> {
    let content: AccountRow = by_id(row)?;
    let AccountRow { account, balances, head, clock } = &content;
    let mut expected = vec![i64::from(account.in_flight)];
    for bucket in [&balances.trial, &balances.premium] {
        let parts = [bucket.credited, bucket.debited, bucket.reserved];
        expected.extend(parts.map(|units| signed(units.get())));
    }
    expected.extend([signed(head.sequence), signed(clock.0)]);
    let mut found = vec![i64::from(row.get::<_, i32>(2))];
    found.extend((3..11).map(|column| row.get::<_, i64>(column)));
    let same = found == expected && row.get::<_, Uuid>(0) == account.id.0;
    agreeing(same, content, "an account")
}

/// `row`, where the columns beside it say the same.
fn agreeing<T>(same: bool, row: T, what: &str) -> StateResult<T> {
    let differs = || StateError::Corrupt(format!("the row of {what} and its columns disagree"));
    same.then_some(row).ok_or_else(differs)
}

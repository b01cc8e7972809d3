//! The audit checks every invariant over everything stored. It computes balances and reservations
//! again from the journal, independently of `apply`.
//!
//! It streams: it holds the balances of each account, the open reservations and a fixed table of
//! sums in memory, and never the journal or the requests, however many there are.

mod multiset_check;
mod pace;
mod replay;
mod rows;
mod source;
mod uses;

use super::amounts::BucketAmounts;
use super::records::{Balances, RequestKey};
use super::state::{StateError, StateResult};
use cresset_base::{AccountId, AttemptId, UnixMillis};
use multiset_check::{Item, MultisetCheck};
pub use pace::{AuditPace, AuditProgress, unpaced};
pub use source::{AuditSource, JournalChain, JournalHeads, RowIter, conflicting_duplicate};
use std::collections::HashMap;
use uses::UseCheck;

/// Violations that a report names; further ones are only counted. One fault can break every row,
/// and a person reads the first few.
const MAX_NAMED: usize = 100;

/// The rows that an audit read, and the violations that it found.
#[derive(Clone, Debug, Default)]
pub struct AuditReport {
    pub ok: bool,
    pub accounts: u64,
    pub credentials: u64,
    pub requests: u64,
    pub reservations: u64,
    pub entries: u64,
    pub violations: Vec<String>,
    /// The ends of the journal's chains as they were read.
    pub heads: JournalHeads,
}

/// Checks everything. An error means that the storage failed, so nothing is known about the ledger.
pub fn everything(source: &dyn AuditSource, pace: AuditPace<'_>) -> StateResult<AuditReport> {
    let mut audit = Audit::of(source, JournalHeads::default(), pace);
    audit.progress.total = source.row_count()?;
    audit.check_everything()?;
    if let Some(second_reading) = std::mem::take(&mut audit.multiset_check).second_reading() {
        let mut again = Audit {
            multiset_check: second_reading,
            progress: audit.progress,
            ..Audit::of(source, JournalHeads::default(), pace)
        };
        again.check_everything()?;
        again
            .multiset_check
            .surpluses()
            .for_each(|(item, surplus)| audit.findings.add(describe_surplus(&item, surplus)));
    }
    Ok(audit.report())
}

/// Checks the journal after `from` and every account and request that it touches. Rows that an
/// earlier audit has checked and no later entry touches are not read.
pub fn since(
    source: &dyn AuditSource,
    from: JournalHeads,
    pace: AuditPace<'_>,
) -> StateResult<AuditReport> {
    let mut audit = Audit::of(source, from, pace);
    audit.count_news()?;
    audit.check_journal()?;
    for (account, replayed) in std::mem::take(&mut audit.replayed) {
        audit.step()?;
        audit.attempt(|audit| {
            let Some(row) = audit.source.account(account)? else {
                return Err(StateError::Corrupt(has_no_row(account)));
            };
            audit.check_account(&row, Some(replayed))
        })?;
    }
    Ok(audit.report())
}

/// `since`, and checks every account, application, credential and reservation there is. What it
/// reads depends on their number and on the journal after `sealed`, and not on the journal before
/// it, nor on the requests that have ended.
pub fn at_start(
    source: &dyn AuditSource,
    sealed: JournalHeads,
    pace: AuditPace<'_>,
) -> StateResult<AuditReport> {
    let mut audit = Audit::of(source, sealed, pace);
    audit.count_news()?;
    audit.check_closed_parts()?;
    audit.check_journal()?;
    audit.check_owners()?;
    Ok(audit.report())
}

fn has_no_row(account: AccountId) -> String {
    format!("account {account} has entries and no row")
}

/// A reservation that the journal has made and not ended.
#[derive(Clone, Copy)]
struct OpenReservation {
    amount: BucketAmounts,
    at: UnixMillis,
}

struct Audit<'s> {
    source: &'s dyn AuditSource,
    pace: AuditPace<'s>,
    progress: AuditProgress,
    findings: Findings,
    report: AuditReport,
    /// The heads after which the journal was read; entries up to them are trusted.
    from: JournalHeads,
    /// Whether there are entries that are trusted.
    is_incremental: bool,
    heads: JournalHeads,
    /// The time of each chain's last entry.
    times: HashMap<JournalChain, UnixMillis>,
    /// Each account's balances after the journal as far as it was read.
    replayed: HashMap<AccountId, Balances>,
    /// Reservations that the journal, as far as it was read, has made and not ended.
    open: HashMap<(RequestKey, AttemptId), OpenReservation>,
    uses: UseCheck,
    multiset_check: MultisetCheck,
}

impl<'s> Audit<'s> {
    fn of(source: &'s dyn AuditSource, from: JournalHeads, pace: AuditPace<'s>) -> Self {
        let is_incremental = from.iter().any(|(_, head)| head.sequence > 0);
        Self {
            source,
            pace,
            progress: AuditProgress::default(),
            findings: Findings::default(),
            report: AuditReport::default(),
            is_incremental,
            heads: from.clone(),
            from,
            times: HashMap::new(),
            replayed: HashMap::new(),
            open: HashMap::new(),
            uses: UseCheck::default(),
            multiset_check: MultisetCheck::default(),
        }
    }

    fn check_everything(&mut self) -> StateResult {
        self.check_closed_parts()?;
        self.check_journal()?;
        self.check_rows()
    }

    fn check_closed_parts(&mut self) -> StateResult {
        self.each(self.source.closed_parts(), |_, ()| Ok(())).map(drop)
    }

    /// Expects to read the entries that are new.
    fn count_news(&mut self) -> StateResult {
        for head in self.source.heads()? {
            // A row that is damaged is a finding of the journal's check.
            let Ok((chain, head)) = head else { continue };
            self.progress.total += head.sequence.saturating_sub(self.from.of(chain).sequence);
        }
        Ok(())
    }

    /// Asks the caller before a row is read.
    fn step(&mut self) -> StateResult {
        (self.pace)(self.progress)?;
        self.progress.done += 1;
        Ok(())
    }

    /// Checks each row and returns how many there are.
    fn each<T>(
        &mut self,
        rows: RowIter<'s, T>,
        mut check: impl FnMut(&mut Self, T) -> StateResult,
    ) -> StateResult<u64> {
        let mut count = 0;
        for row in rows? {
            count += 1;
            self.step()?;
            self.attempt(|audit| check(audit, row?))?;
        }
        Ok(count)
    }

    /// Turns a damaged row into a finding; only a failure of the storage ends the audit.
    fn attempt(&mut self, check: impl FnOnce(&mut Self) -> StateResult) -> StateResult {
        match check(self) {
            Err(StateError::Corrupt(what)) => self.findings.add(what),
            other => return other,
        }
        Ok(())
    }

    fn require(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.findings.add(what());
        }
    }

    fn report(self) -> AuditReport {
        let violations = self.findings.list();
        AuditReport { ok: violations.is_empty(), violations, heads: self.heads, ..self.report }
    }
}

fn describe_surplus(item: &Item, surplus: i128) -> String {
    let differs = match item {
        Item::Spent(..) | Item::Used(..) if surplus < 0 => "more than its journal says",
        Item::Spent(..) | Item::Used(..) => "less than its journal says",
        _ if surplus < 0 => "is not in the journal",
        Item::Attempt(..) => "is reserved twice",
        Item::Adjustment(..) => "is journalled twice",
    };
    format!("{item} {differs}")
}

#[derive(Default)]
struct Findings {
    named: Vec<String>,
    unnamed: u64,
}

impl Findings {
    fn add(&mut self, what: String) {
        if self.named.len() < MAX_NAMED {
            self.named.push(what);
        } else {
            self.unnamed += 1;
        }
    }

    fn list(mut self) -> Vec<String> {
        if self.unnamed > 0 {
            self.named.push(format!("and {} more violations", self.unnamed));
        }
        self.named
    }
}

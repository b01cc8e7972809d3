//! The seam between the rules and the storage of rows: an embedded database, memory, or a
//! distributed one.

use super::amounts::{BucketAmounts, Microcredits};
use super::records::{
    Account, Application, Balances, Bucket, Credential, JournalEntry, RequestKey, RequestRecord,
};
use cresset_base::{AccountId, ApplicationId, AttemptId, BootId, CredentialId, UnixMillis};

/// The error when rows cannot be read or written: then nothing may be decided.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    #[error("the ledger's storage failed: {0}")]
    Io(String),
    /// A row differs from what was written: its checksum, its version or its fields are wrong.
    #[error("a stored row is damaged: {0}")]
    Corrupt(String),
}

/// The end of a chain of the journal, from which its next entry follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalHead {
    /// Sequence of the last entry, 0 when there is none.
    pub sequence: u64,
    pub hash: [u8; 16],
}

/// An open reservation: it exists exactly while its attempt is queued or running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    pub key: RequestKey,
    pub attempt: AttemptId,
    pub boot: BootId,
    pub amount: BucketAmounts,
    /// Prompt tokens and the most that may be produced.
    pub tokens: u64,
}

/// How often an input was running when the node went down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crashes {
    /// Number of boots that ended so; several requests with one input count once.
    pub count: u32,
    /// The last of those boots.
    pub boot: BootId,
    /// The time at which the last of them was counted.
    pub at: UnixMillis,
}

impl Crashes {
    /// Whether the last crash is less than `crash_block_ms` ago at `now`. Older ones do not count.
    pub fn count_at(&self, now: UnixMillis, crash_block_ms: u64) -> bool {
        now.0 < self.at.0.saturating_add(crash_block_ms)
    }

    /// Whether they are two or more. Their input is refused as long as they count.
    pub fn are_too_many(&self, now: UnixMillis, crash_block_ms: u64) -> bool {
        self.count >= 2 && self.count_at(now, crash_block_ms)
    }
}

/// The grant or debit of an operator that a reference was used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adjustment {
    pub bucket: Bucket,
    pub units: Microcredits,
    /// Taken from the balance instead of added to it.
    pub is_debit: bool,
}

/// The result of reading or writing rows.
pub type StateResult<T = ()> = Result<T, StateError>;

/// Rows as one transaction reads and writes them. A `put` replaces; every command reads and checks
/// all it needs before its first `put`.
pub trait LedgerState {
    fn account(&self, id: AccountId) -> StateResult<Option<Account>>;
    fn put_account(&mut self, account: &Account) -> StateResult;
    /// Zero for an account without entries.
    fn balances(&self, id: AccountId) -> StateResult<Balances>;
    fn put_balances(&mut self, id: AccountId, balances: &Balances) -> StateResult;
    fn application(&self, id: ApplicationId) -> StateResult<Option<Application>>;
    fn put_application(&mut self, application: &Application) -> StateResult;
    fn credential(&self, id: CredentialId) -> StateResult<Option<Credential>>;
    fn credential_by_digest(&self, digest: &[u8; 32]) -> StateResult<Option<Credential>>;
    fn put_credential(&mut self, credential: &Credential) -> StateResult;
    fn adjustment(&self, account: AccountId, reference: &str) -> StateResult<Option<Adjustment>>;
    fn put_adjustment(
        &mut self,
        account: AccountId,
        reference: &str,
        row: Adjustment,
    ) -> StateResult;
    fn request(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>>;
    /// A request past retention: it is still known and never run again.
    fn archived(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>>;
    fn put_request(&mut self, record: &RequestRecord) -> StateResult;
    fn remove_request(&mut self, key: &RequestKey) -> StateResult;
    fn reservation(&self, key: &RequestKey) -> StateResult<Option<Reservation>>;
    fn put_reservation(&mut self, reservation: &Reservation) -> StateResult;
    fn remove_reservation(&mut self, key: &RequestKey) -> StateResult;
    /// At most `limit` reservations made by boots other than `boot`.
    fn foreign_reservations(&self, boot: BootId, limit: usize) -> StateResult<Vec<Reservation>>;
    /// The crashes during which an input of this account was running.
    fn crashes(&self, account: AccountId, fingerprint: &[u8; 32]) -> StateResult<Option<Crashes>>;
    fn put_crashes(
        &mut self,
        account: AccountId,
        fingerprint: &[u8; 32],
        crashes: Crashes,
    ) -> StateResult;
    fn remove_crashes(&mut self, account: AccountId, fingerprint: &[u8; 32]) -> StateResult;
    /// When the rate of the account's admissions has recovered, microseconds since 1970. `None`
    /// where no other node admits, and the rate is counted elsewhere.
    fn rate_due(&self, _account: AccountId) -> StateResult<Option<u64>> {
        Ok(None)
    }
    /// `None` changes nothing.
    fn put_rate_due(&mut self, _account: AccountId, _due: Option<u64>) -> StateResult {
        Ok(())
    }
    /// The end of the chain that the account's entries belong to. The implementation chooses
    /// whether all accounts share one chain or each has its own.
    fn head(&self, account: AccountId) -> StateResult<JournalHead>;
    /// Appends to the chain of the entry's account and moves its head.
    fn append(&mut self, entry: &JournalEntry) -> StateResult;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_crashes_are_one_too_many_for_a_while() {
        let check = |count, now, expect| {
            let crashes = Crashes { count, boot: BootId::generate(), at: UnixMillis(1_000) };
            assert_eq!(crashes.are_too_many(UnixMillis(now), 500), expect);
        };
        check(1, 1_000, false);
        check(2, 1_499, true);
        check(2, 1_500, false);
    }
}

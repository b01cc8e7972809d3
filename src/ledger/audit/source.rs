//! What the audit reads: rows of each kind one after the other, and single rows by key.

use crate::ids::{AccountId, ApplicationId};
use crate::ledger::records::{
    Account, Application, Balances, Credential, JournalEntry, RequestKey, RequestRecord,
};
use crate::ledger::state::{Granted, JournalHead, Reservation, StateError, StateResult};

/// Rows one by one. A row that is damaged or lies under a wrong key is an `Err` item of its own.
pub type RowIter<'a, T> = StateResult<Box<dyn Iterator<Item = StateResult<T>> + 'a>>;

/// Everything stored, as one consistent reading of it.
pub trait AuditSource {
    fn accounts(&self) -> RowIter<'_, Account>;
    fn all_balances(&self) -> RowIter<'_, (AccountId, Balances)>;
    fn applications(&self) -> RowIter<'_, Application>;
    fn credentials(&self) -> RowIter<'_, Credential>;
    fn grants(&self) -> RowIter<'_, (AccountId, String, Granted)>;
    /// Recent and archived ones, each once.
    fn requests(&self) -> RowIter<'_, RequestRecord>;
    fn reservations(&self) -> RowIter<'_, Reservation>;
    fn reservations_of(&self, account: AccountId) -> RowIter<'_, Reservation>;
    /// The journal after this sequence.
    fn entries(&self, after: u64) -> RowIter<'_, JournalEntry>;

    fn account(&self, id: AccountId) -> StateResult<Option<Account>>;
    fn balances(&self, id: AccountId) -> StateResult<Balances>;
    fn application(&self, id: ApplicationId) -> StateResult<Option<Application>>;
    fn credential_by_digest(&self, digest: &[u8; 32]) -> StateResult<Option<Credential>>;
    fn granted(&self, account: AccountId, reference: &str) -> StateResult<Option<Granted>>;
    fn request(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>>;
    fn reservation(&self, key: &RequestKey) -> StateResult<Option<Reservation>>;
    fn entry(&self, sequence: u64) -> StateResult<Option<JournalEntry>>;
    /// An account's last entry up to this sequence.
    fn entry_of(&self, account: AccountId, until: u64) -> StateResult<Option<JournalEntry>>;
    fn head(&self) -> StateResult<JournalHead>;
}

/// The error with which `AuditSource::requests` reports an archived request whose recent duplicate
/// differs from it.
pub fn conflicting_duplicate(key: &RequestKey) -> StateError {
    StateError::Corrupt(format!("{key} is archived with other content"))
}

//! What the audit reads: rows of each kind one after the other, and single rows by key.

use crate::ids::{AccountId, ApplicationId};
use crate::ledger::records::{
    Account, Application, Balances, Credential, Entry, RequestKey, RequestRecord,
};
use crate::ledger::state::{Granted, Head, Reservation, StateError};

pub type Result<T> = std::result::Result<T, StateError>;

/// Rows one by one. One that is damaged, or lies where it does not belong, is an item of its own.
pub type Rows<'a, T> = Result<Box<dyn Iterator<Item = Result<T>> + 'a>>;

/// Everything stored, as one consistent reading of it.
pub trait AuditSource {
    fn accounts(&self) -> Rows<'_, Account>;
    fn all_balances(&self) -> Rows<'_, (AccountId, Balances)>;
    fn applications(&self) -> Rows<'_, Application>;
    fn credentials(&self) -> Rows<'_, Credential>;
    fn grants(&self) -> Rows<'_, (AccountId, String, Granted)>;
    /// Recent and archived ones, each once.
    fn requests(&self) -> Rows<'_, RequestRecord>;
    fn reservations(&self) -> Rows<'_, Reservation>;
    fn reservations_of(&self, account: AccountId) -> Rows<'_, Reservation>;
    /// The journal after this sequence.
    fn entries(&self, after: u64) -> Rows<'_, Entry>;

    fn account(&self, id: AccountId) -> Result<Option<Account>>;
    fn balances(&self, id: AccountId) -> Result<Balances>;
    fn application(&self, id: ApplicationId) -> Result<Option<Application>>;
    fn credential_by_digest(&self, digest: &[u8; 32]) -> Result<Option<Credential>>;
    fn granted(&self, account: AccountId, reference: &str) -> Result<Option<Granted>>;
    fn request(&self, key: &RequestKey) -> Result<Option<RequestRecord>>;
    fn reservation(&self, key: &RequestKey) -> Result<Option<Reservation>>;
    fn entry(&self, sequence: u64) -> Result<Option<Entry>>;
    /// An account's last entry up to this sequence.
    fn entry_of(&self, account: AccountId, until: u64) -> Result<Option<Entry>>;
    fn head(&self) -> Result<Head>;
}

/// The error with which `AuditSource::requests` reports an archived request whose recent duplicate
/// differs from it.
pub fn conflicting_duplicate(key: &RequestKey) -> StateError {
    StateError::Corrupt(format!("{key} is archived with other content"))
}

//! The rows that an audit reads: those of each kind one after the other, and single rows by key.

use crate::records::{
    Account, Application, Balances, Credential, JournalEntry, RequestKey, RequestRecord,
};
use crate::state::{Adjustment, JournalHead, Reservation, StateError, StateResult};
use cresset_base::{AccountId, ApplicationId};
use std::collections::HashMap;

/// Rows one by one. A row that is damaged or stored under a wrong key is an `Err` item of its own.
pub type RowIter<'a, T> = StateResult<Box<dyn Iterator<Item = StateResult<T>> + 'a>>;

/// A chain of journal entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum JournalChain {
    /// The entries of all accounts.
    Shared,
    /// The entries of one account.
    Account(AccountId),
}

/// The heads of the journal's chains; a chain that is not among them is empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JournalHeads(HashMap<JournalChain, JournalHead>);

impl JournalHeads {
    pub fn of(&self, chain: JournalChain) -> JournalHead {
        self.0.get(&chain).copied().unwrap_or_default()
    }

    /// Moves a chain's head and returns where it was.
    pub(super) fn advance(&mut self, chain: JournalChain, to: JournalHead) -> JournalHead {
        self.0.insert(chain, to).unwrap_or_default()
    }

    /// The later head of each chain.
    pub fn later(mut self, other: &Self) -> Self {
        for (chain, head) in other.iter() {
            if head.sequence > self.of(chain).sequence {
                self.advance(chain, head);
            }
        }
        self
    }

    pub fn iter(&self) -> impl Iterator<Item = (JournalChain, JournalHead)> {
        self.0.iter().map(|(chain, head)| (*chain, *head))
    }
}

/// The head of a journal that is one chain.
impl From<JournalHead> for JournalHeads {
    fn from(head: JournalHead) -> Self {
        Self([(JournalChain::Shared, head)].into())
    }
}

impl FromIterator<(JournalChain, JournalHead)> for JournalHeads {
    fn from_iter<I: IntoIterator<Item = (JournalChain, JournalHead)>>(heads: I) -> Self {
        Self(heads.into_iter().collect())
    }
}

/// One consistent reading of everything stored.
pub trait AuditSource {
    fn accounts(&self) -> RowIter<'_, Account>;
    fn all_balances(&self) -> RowIter<'_, (AccountId, Balances)>;
    fn applications(&self) -> RowIter<'_, Application>;
    fn credentials(&self) -> RowIter<'_, Credential>;
    fn grants(&self) -> RowIter<'_, (AccountId, String, Adjustment)>;
    /// Recent and archived requests, each once.
    fn requests(&self) -> RowIter<'_, RequestRecord>;
    fn reservations(&self) -> RowIter<'_, Reservation>;
    fn reservations_of(&self, account: AccountId) -> RowIter<'_, Reservation>;
    /// The chain that an account's entries belong to.
    fn chain_of(&self, account: AccountId) -> JournalChain;
    /// The recorded head of every chain that has entries.
    fn heads(&self) -> RowIter<'_, (JournalChain, JournalHead)>;
    /// The entries after these heads, each chain in its own order.
    fn entries(&self, after: &JournalHeads) -> RowIter<'_, JournalEntry>;

    /// Sequences of the entries of a chain after which an operator set the time back.
    fn set_back_after(&self, chain: JournalChain) -> StateResult<Vec<u64>>;

    /// Whether uses of any period may be missing of the account and its keys: a build before schema
    /// 2 forgot what had been spent in a period to which the time came back.
    fn misses_uses(&self, account: AccountId) -> StateResult<bool>;

    /// Parts of the journal that were closed: one item for each, an `Err` for one that is missing
    /// or is not what it was. It reads little of them.
    fn closed_parts(&self) -> RowIter<'_, ()>;

    /// Rows of all kinds that an audit of everything reads.
    fn row_count(&self) -> StateResult<u64>;
    /// Rows that only lead to others: one item for each, an `Err` where it leads nowhere.
    fn index_rows(&self) -> RowIter<'_, ()>;
    /// Stored answers and the sums of their bytes: one item for each, an `Err` where it is damaged
    /// or wrong.
    fn answers(&self) -> RowIter<'_, ()>;

    fn account(&self, id: AccountId) -> StateResult<Option<Account>>;
    fn balances(&self, id: AccountId) -> StateResult<Balances>;
    fn application(&self, id: ApplicationId) -> StateResult<Option<Application>>;
    fn credential_by_digest(&self, digest: &[u8; 32]) -> StateResult<Option<Credential>>;
    fn adjustment(&self, account: AccountId, reference: &str) -> StateResult<Option<Adjustment>>;
    fn request(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>>;
    fn reservation(&self, key: &RequestKey) -> StateResult<Option<Reservation>>;
    fn entry(&self, chain: JournalChain, sequence: u64) -> StateResult<Option<JournalEntry>>;
    /// The balances with which the account's last entry left it; `None` where that entry takes long
    /// to find.
    fn recent_balances(&self, account: AccountId) -> StateResult<Option<Balances>>;
    /// An account's last entry up to this sequence of its chain.
    fn entry_of(&self, account: AccountId, until: u64) -> StateResult<Option<JournalEntry>>;
}

/// The error with which `AuditSource::requests` reports an archived request whose recent duplicate
/// differs from it.
pub fn conflicting_duplicate(key: &RequestKey) -> StateError {
    StateError::Corrupt(format!("{key} is archived with other content"))
}

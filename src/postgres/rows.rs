//! Rows as the tables hold them, and the rows that a transaction has in memory.

use cresset_base::{AccountId, ApplicationId, CredentialId, UnixMillis};
use cresset_ledger::{
    Account, Adjustment, Application, Balances, Crashes, Credential, JournalEntry, JournalHead,
    RequestKey, RequestRecord, Reservation, StateError, StateResult,
};
use cresset_store::codec::{StoredField, decode};
use cresset_store::row;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use tokio_postgres::Row;

use super::keys::InputKey;

/// An account with all that its chain of the journal leads to.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AccountRow {
    pub account: Account,
    pub balances: Balances,
    pub head: JournalHead,
    /// The time of its last entry.
    pub clock: UnixMillis,
}

row!(AccountRow { account, balances, head, clock } version 2);

impl AccountRow {
    pub(super) fn new(account: Account) -> Self {
        let (balances, head, clock) = Default::default();
        Self { account, balances, head, clock }
    }
}

/// The content of a row under the bytes of its key. A value of another type is as damaged as one
/// with a wrong checksum.
pub(super) fn content<T: StoredField>(row: &Row, column: usize, key: &[u8]) -> StateResult<T> {
    let stored: &[u8] = row
        .try_get(column)
        .map_err(|error| StateError::Corrupt(format!("{error}, under key {}", hex::encode(key))))?;
    decode(key, stored)
}

/// The bytes of a column that always has this many.
pub(super) fn fixed<const N: usize>(row: &Row, column: usize) -> Option<[u8; N]> {
    row.try_get::<_, &[u8]>(column).ok()?.try_into().ok()
}

/// The rows of one table that a transaction has read, as it leaves them.
pub(super) struct Rows<K, T> {
    known: HashMap<K, StateResult<Option<T>>>,
    /// Keys of rows that are in the database.
    stored: HashSet<K>,
    changed: BTreeSet<K>,
}

impl<K, T> Default for Rows<K, T> {
    fn default() -> Self {
        Self { known: HashMap::new(), stored: HashSet::new(), changed: BTreeSet::new() }
    }
}

impl<K: Clone + Hash + Ord, T: Clone> Rows<K, T> {
    pub(super) fn knows(&self, key: &K) -> bool {
        self.known.contains_key(key)
    }

    pub(super) fn get(&self, key: &K) -> Option<StateResult<Option<T>>> {
        self.known.get(key).cloned()
    }

    /// The row of a key, where it is known, there and sound.
    pub(super) fn sound(&self, key: &K) -> Option<&T> {
        self.known.get(key)?.as_ref().ok()?.as_ref()
    }

    /// Takes a row that was read, unless it is known already.
    pub(super) fn found(&mut self, key: K, row: StateResult<T>) {
        if !self.knows(&key) {
            self.stored.insert(key.clone());
            self.known.insert(key, row.map(Some));
        }
    }

    /// Notes that the rows of these keys that were not found are not there.
    pub(super) fn absent<'a>(&mut self, keys: impl IntoIterator<Item = &'a K>)
    where
        K: 'a,
    {
        for key in keys {
            if !self.knows(key) {
                self.known.insert(key.clone(), Ok(None));
            }
        }
    }

    pub(super) fn put(&mut self, key: K, row: T) {
        self.changed.insert(key.clone());
        self.known.insert(key, Ok(Some(row)));
    }

    pub(super) fn remove(&mut self, key: &K) {
        self.changed.insert(key.clone());
        self.known.insert(key.clone(), Ok(None));
    }

    pub(super) fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Rows that the database does not have yet.
    pub(super) fn inserted(&self) -> Vec<(&K, &T)> {
        self.written(|key| !self.stored.contains(key))
    }

    /// Rows that replace those of the database.
    pub(super) fn updated(&self) -> Vec<(&K, &T)> {
        self.written(|key| self.stored.contains(key))
    }

    /// Both.
    pub(super) fn put_rows(&self) -> Vec<(&K, &T)> {
        self.written(|_| true)
    }

    /// Keys of rows that the database has and that are to go.
    pub(super) fn removed(&self) -> Vec<&K> {
        let gone = |key: &&K| matches!(self.known.get(*key), Some(Ok(None)));
        self.changed.iter().filter(|key| self.stored.contains(key)).filter(gone).collect()
    }

    fn written(&self, which: impl Fn(&K) -> bool) -> Vec<(&K, &T)> {
        let chosen = self.changed.iter().filter(|key| which(key));
        chosen.filter_map(|key| Some((key, self.sound(key)?))).collect()
    }

    /// The sound rows that are known.
    pub(super) fn all(&self) -> impl Iterator<Item = &T> {
        self.known.values().filter_map(|row| row.as_ref().ok()?.as_ref())
    }
}

pub(super) type AccountRates = HashMap<AccountId, u64>;

/// All rows that a transaction has read or made.
#[derive(Default)]
pub(super) struct BatchRows {
    pub accounts: Rows<AccountId, AccountRow>,
    /// Accounts that were not read, because another transaction has them or they are not there.
    pub left_out: BTreeSet<AccountId>,
    /// When the rates of these accounts' admissions have recovered, microseconds since 1970.
    pub rates: AccountRates,
    pub credentials: Rows<CredentialId, Credential>,
    /// Credentials by the digests of their secrets.
    pub digests: Rows<[u8; 32], Credential>,
    pub applications: Rows<ApplicationId, Application>,
    pub adjustments: Rows<(AccountId, String), Adjustment>,
    pub requests: Rows<RequestKey, RequestRecord>,
    pub reservations: Rows<RequestKey, Reservation>,
    pub crashes: Rows<InputKey, Crashes>,
    pub entries: Vec<JournalEntry>,
}

impl BatchRows {
    pub(super) fn has_changed(&self) -> bool {
        self.accounts.has_changed()
            || self.credentials.has_changed()
            || self.applications.has_changed()
            || self.adjustments.has_changed()
            || self.requests.has_changed()
            || self.reservations.has_changed()
            || self.crashes.has_changed()
    }
}

//! The ledger in memory: the second implementation of `LedgerState`, against which the store is
//! judged.

use super::audit::{self, AuditSource, Rows};
use super::records::{
    Account, Application, Balances, Credential, Entry, RequestKey, RequestRecord,
};
use super::state::{Crashes, Granted, Head, LedgerState, Reservation, StateError};
use crate::ids::{AccountId, ApplicationId, BootId, CredentialId};
use std::collections::BTreeMap;

type Result<T> = std::result::Result<T, StateError>;

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct MemoryState {
    pub accounts: BTreeMap<AccountId, Account>,
    pub balances: BTreeMap<AccountId, Balances>,
    pub applications: BTreeMap<ApplicationId, Application>,
    pub credentials: BTreeMap<CredentialId, Credential>,
    pub granted: BTreeMap<(AccountId, String), Granted>,
    pub requests: BTreeMap<RequestKey, RequestRecord>,
    pub archived: BTreeMap<RequestKey, RequestRecord>,
    pub reservations: BTreeMap<RequestKey, Reservation>,
    pub crashes: BTreeMap<(AccountId, [u8; 32]), Crashes>,
    pub entries: Vec<Entry>,
}

impl MemoryState {
    pub fn audit(&self) -> Vec<String> {
        audit::everything(self).unwrap().violations
    }
}

#[expect(clippy::unnecessary_wraps, reason = "the shape that the audit reads")]
fn rows<'a, T: 'a>(rows: impl Iterator<Item = T> + 'a) -> Rows<'a, T> {
    Ok(Box::new(rows.map(Ok)))
}

impl AuditSource for MemoryState {
    fn accounts(&self) -> Rows<'_, Account> {
        rows(self.accounts.values().cloned())
    }
    fn all_balances(&self) -> Rows<'_, (AccountId, Balances)> {
        rows(self.balances.iter().map(|(id, balances)| (*id, *balances)))
    }
    fn applications(&self) -> Rows<'_, Application> {
        rows(self.applications.values().cloned())
    }
    fn credentials(&self) -> Rows<'_, Credential> {
        rows(self.credentials.values().cloned())
    }
    fn grants(&self) -> Rows<'_, (AccountId, String, Granted)> {
        rows(
            self.granted
                .iter()
                .map(|((account, reference), granted)| (*account, reference.clone(), *granted)),
        )
    }
    fn requests(&self) -> Rows<'_, RequestRecord> {
        let archived =
            self.archived.values().filter(|record| self.requests.get(&record.key) != Some(record));
        let archived = archived.map(|record| match self.requests.get(&record.key) {
            None => Ok(record.clone()),
            Some(_) => Err(audit::conflicting_duplicate(&record.key)),
        });
        Ok(Box::new(self.requests.values().cloned().map(Ok).chain(archived)))
    }
    fn reservations(&self) -> Rows<'_, Reservation> {
        rows(self.reservations.values().copied())
    }
    fn reservations_of(&self, account: AccountId) -> Rows<'_, Reservation> {
        rows(self.reservations.values().filter(move |open| open.key.account == account).copied())
    }
    fn entries(&self, after: u64) -> Rows<'_, Entry> {
        rows(self.entries.iter().skip(after as usize).cloned())
    }
    fn account(&self, id: AccountId) -> Result<Option<Account>> {
        LedgerState::account(self, id)
    }
    fn balances(&self, id: AccountId) -> Result<Balances> {
        LedgerState::balances(self, id)
    }
    fn application(&self, id: ApplicationId) -> Result<Option<Application>> {
        LedgerState::application(self, id)
    }
    fn credential_by_digest(&self, digest: &[u8; 32]) -> Result<Option<Credential>> {
        LedgerState::credential_by_digest(self, digest)
    }
    fn granted(&self, account: AccountId, reference: &str) -> Result<Option<Granted>> {
        LedgerState::granted(self, account, reference)
    }
    fn request(&self, key: &RequestKey) -> Result<Option<RequestRecord>> {
        Ok(self.requests.get(key).or_else(|| self.archived.get(key)).cloned())
    }
    fn reservation(&self, key: &RequestKey) -> Result<Option<Reservation>> {
        LedgerState::reservation(self, key)
    }
    fn entry(&self, sequence: u64) -> Result<Option<Entry>> {
        Ok(self.entries.iter().find(|entry| entry.sequence == sequence).cloned())
    }
    fn entry_of(&self, account: AccountId, until: u64) -> Result<Option<Entry>> {
        let mut own =
            self.entries.iter().filter(|entry| entry.account == account && entry.sequence <= until);
        Ok(own.next_back().cloned())
    }
    fn head(&self) -> Result<Head> {
        LedgerState::head(self)
    }
}

impl LedgerState for MemoryState {
    fn account(&self, id: AccountId) -> Result<Option<Account>> {
        Ok(self.accounts.get(&id).cloned())
    }
    fn put_account(&mut self, account: &Account) -> Result<()> {
        self.accounts.insert(account.id, account.clone());
        Ok(())
    }
    fn balances(&self, id: AccountId) -> Result<Balances> {
        Ok(self.balances.get(&id).copied().unwrap_or_default())
    }
    fn put_balances(&mut self, id: AccountId, balances: &Balances) -> Result<()> {
        self.balances.insert(id, *balances);
        Ok(())
    }
    fn application(&self, id: ApplicationId) -> Result<Option<Application>> {
        Ok(self.applications.get(&id).cloned())
    }
    fn put_application(&mut self, application: &Application) -> Result<()> {
        self.applications.insert(application.id, application.clone());
        Ok(())
    }
    fn credential(&self, id: CredentialId) -> Result<Option<Credential>> {
        Ok(self.credentials.get(&id).cloned())
    }
    fn credential_by_digest(&self, digest: &[u8; 32]) -> Result<Option<Credential>> {
        let mut all = self.credentials.values();
        Ok(all.find(|credential| credential.digest == *digest).cloned())
    }
    fn put_credential(&mut self, credential: &Credential) -> Result<()> {
        self.credentials.insert(credential.id, credential.clone());
        Ok(())
    }
    fn granted(&self, account: AccountId, reference: &str) -> Result<Option<Granted>> {
        Ok(self.granted.get(&(account, reference.to_owned())).copied())
    }
    fn put_granted(&mut self, account: AccountId, reference: &str, granted: Granted) -> Result<()> {
        self.granted.insert((account, reference.to_owned()), granted);
        Ok(())
    }
    fn request(&self, key: &RequestKey) -> Result<Option<RequestRecord>> {
        Ok(self.requests.get(key).cloned())
    }
    fn archived(&self, key: &RequestKey) -> Result<Option<RequestRecord>> {
        Ok(self.archived.get(key).cloned())
    }
    fn put_request(&mut self, record: &RequestRecord) -> Result<()> {
        self.requests.insert(record.key, record.clone());
        Ok(())
    }
    fn reservation(&self, key: &RequestKey) -> Result<Option<Reservation>> {
        Ok(self.reservations.get(key).copied())
    }
    fn put_reservation(&mut self, reservation: &Reservation) -> Result<()> {
        self.reservations.insert(reservation.key, *reservation);
        Ok(())
    }
    fn remove_reservation(&mut self, key: &RequestKey) -> Result<()> {
        self.reservations.remove(key);
        Ok(())
    }
    fn foreign_reservations(&self, boot: BootId, limit: usize) -> Result<Vec<Reservation>> {
        let mut foreign: Vec<_> =
            self.reservations.values().filter(|open| open.boot != boot).copied().collect();
        // The order any stored state finds them in: all scopes of an id lie together.
        foreign.sort_by_key(|open| (open.key.account, open.key.request, open.key.application));
        foreign.truncate(limit);
        Ok(foreign)
    }
    fn crashes(&self, account: AccountId, fingerprint: &[u8; 32]) -> Result<Option<Crashes>> {
        Ok(self.crashes.get(&(account, *fingerprint)).copied())
    }
    fn put_crashes(
        &mut self,
        account: AccountId,
        fingerprint: &[u8; 32],
        crashes: Crashes,
    ) -> Result<()> {
        self.crashes.insert((account, *fingerprint), crashes);
        Ok(())
    }
    fn head(&self) -> Result<Head> {
        Ok(self
            .entries
            .last()
            .map_or(Head::default(), |entry| Head { sequence: entry.sequence, hash: entry.hash }))
    }
    fn append(&mut self, entry: &Entry) -> Result<()> {
        self.entries.push(entry.clone());
        Ok(())
    }
}

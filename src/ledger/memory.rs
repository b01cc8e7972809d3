//! The ledger in memory: the second implementation of `LedgerState`, against which the store is judged.

use super::audit::Audit;
use super::records::{Account, Application, Balances, Credential, Entry, RequestKey, RequestRecord};
use super::state::{Crashes, Granted, Head, LedgerState, Reservation, StateError};
use crate::ids::{AccountId, ApplicationId, BootId, CredentialId};
use std::collections::BTreeMap;

type Result<T> = std::result::Result<T, StateError>;

#[derive(Clone, Default)]
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
        let mut audit = Audit::default();
        let accounts = self.accounts.values().cloned();
        accounts.for_each(|account| audit.account(account));
        for (id, balances) in &self.balances {
            audit.balances(*id, *balances);
        }
        for application in self.applications.values() {
            audit.application(application);
        }
        for credential in self.credentials.values() {
            audit.credential(credential, Some(credential));
        }
        for ((account, reference), granted) in &self.granted {
            audit.granted(*account, reference.clone(), *granted);
        }
        let requests = self.requests.values().chain(self.archived.values());
        requests.for_each(|record| audit.request(record.clone()));
        for reservation in self.reservations.values() {
            audit.reservation(*reservation);
        }
        for entry in &self.entries {
            audit.entry(entry);
        }
        audit.finish(self.head().unwrap())
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
        let mut foreign: Vec<_> = self.reservations.values().filter(|open| open.boot != boot).copied().collect();
        // The order any stored state finds them in: all scopes of an id lie together.
        foreign.sort_by_key(|open| (open.key.account, open.key.request, open.key.application));
        foreign.truncate(limit);
        Ok(foreign)
    }
    fn crashes(&self, account: AccountId, fingerprint: &[u8; 32]) -> Result<Option<Crashes>> {
        Ok(self.crashes.get(&(account, *fingerprint)).copied())
    }
    fn put_crashes(&mut self, account: AccountId, fingerprint: &[u8; 32], crashes: Crashes) -> Result<()> {
        self.crashes.insert((account, *fingerprint), crashes);
        Ok(())
    }
    fn head(&self) -> Result<Head> {
        Ok(self.entries.last().map_or(Head::default(), |entry| Head { sequence: entry.sequence, hash: entry.hash }))
    }
    fn append(&mut self, entry: &Entry) -> Result<()> {
        self.entries.push(entry.clone());
        Ok(())
    }
}

//! The ledger in memory: the second implementation of `LedgerState`, with which the store is
//! compared.

use crate::audit::{self, AuditSource, JournalChain, JournalHeads, RowIter};
use crate::records::{
    Account, Application, Balances, Credential, JournalEntry, RequestKey, RequestRecord,
};
use crate::state::{Adjustment, Crashes, JournalHead, LedgerState, Reservation, StateResult};
use cresset_base::{AccountId, ApplicationId, BootId, CredentialId};
use std::collections::{BTreeMap, HashMap};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryState {
    pub accounts: BTreeMap<AccountId, Account>,
    pub balances: BTreeMap<AccountId, Balances>,
    pub applications: BTreeMap<ApplicationId, Application>,
    pub credentials: BTreeMap<CredentialId, Credential>,
    pub granted: BTreeMap<(AccountId, String), Adjustment>,
    pub requests: BTreeMap<RequestKey, RequestRecord>,
    pub archived: BTreeMap<RequestKey, RequestRecord>,
    pub reservations: BTreeMap<RequestKey, Reservation>,
    pub crashes: BTreeMap<(AccountId, [u8; 32]), Crashes>,
    pub entries: Vec<JournalEntry>,
    /// Whether each account has a journal chain of its own, as a shared database would keep them.
    pub chain_per_account: bool,
    /// Entries after which the time was set back, each with its chain.
    pub set_back: Vec<(JournalChain, u64)>,
}

impl MemoryState {
    /// Records that the next entries may have an earlier time.
    pub fn set_time_back(&mut self) {
        let heads = AuditSource::heads(self).expect("rows in memory can be read");
        let places: Vec<_> = heads.flatten().map(|(chain, head)| (chain, head.sequence)).collect();
        self.set_back.extend(places);
    }

    pub fn audit(&self) -> Vec<String> {
        let audited = audit::everything(self, &audit::unpaced);
        audited.expect("rows in memory can be read").violations
    }
}

#[expect(clippy::unnecessary_wraps, reason = "the shape that the audit reads")]
fn rows<'a, T: 'a>(rows: impl Iterator<Item = T> + 'a) -> RowIter<'a, T> {
    Ok(Box::new(rows.map(Ok)))
}

impl AuditSource for MemoryState {
    fn accounts(&self) -> RowIter<'_, Account> {
        rows(self.accounts.values().cloned())
    }
    fn all_balances(&self) -> RowIter<'_, (AccountId, Balances)> {
        rows(self.balances.iter().map(|(id, balances)| (*id, *balances)))
    }
    fn applications(&self) -> RowIter<'_, Application> {
        rows(self.applications.values().cloned())
    }
    fn credentials(&self) -> RowIter<'_, Credential> {
        rows(self.credentials.values().cloned())
    }
    fn grants(&self) -> RowIter<'_, (AccountId, String, Adjustment)> {
        rows(
            self.granted
                .iter()
                .map(|((account, reference), granted)| (*account, reference.clone(), *granted)),
        )
    }
    fn requests(&self) -> RowIter<'_, RequestRecord> {
        let archived =
            self.archived.values().filter(|record| self.requests.get(&record.key) != Some(record));
        let archived = archived.map(|record| match self.requests.get(&record.key) {
            None => Ok(record.clone()),
            Some(_) => Err(audit::conflicting_duplicate(&record.key)),
        });
        Ok(Box::new(self.requests.values().cloned().map(Ok).chain(archived)))
    }
    fn reservations(&self) -> RowIter<'_, Reservation> {
        rows(self.reservations.values().copied())
    }
    fn reservations_of(&self, account: AccountId) -> RowIter<'_, Reservation> {
        rows(self.reservations.values().filter(move |open| open.key.account == account).copied())
    }
    fn chain_of(&self, account: AccountId) -> JournalChain {
        if self.chain_per_account { JournalChain::Account(account) } else { JournalChain::Shared }
    }
    fn heads(&self) -> RowIter<'_, (JournalChain, JournalHead)> {
        let head =
            |entry: &JournalEntry| JournalHead { sequence: entry.sequence, hash: entry.hash };
        let ends = self.entries.iter().map(|entry| (self.chain_of(entry.account), head(entry)));
        rows(ends.collect::<HashMap<_, _>>().into_iter())
    }
    fn entries(&self, after: &JournalHeads) -> RowIter<'_, JournalEntry> {
        let trusted: Vec<_> = self
            .entries
            .iter()
            .map(|entry| entry.sequence <= after.of(self.chain_of(entry.account)).sequence)
            .collect();
        let numbered = trusted.into_iter().zip(&self.entries);
        rows(numbered.filter(|(trusted, _)| !trusted).map(|(_, entry)| entry.clone()))
    }
    fn set_back_after(&self, chain: JournalChain) -> StateResult<Vec<u64>> {
        let own = self.set_back.iter().filter(|(of, _)| *of == chain);
        Ok(own.map(|(_, sequence)| *sequence).collect())
    }
    fn misses_uses(&self, _: AccountId) -> StateResult<bool> {
        Ok(false)
    }
    fn closed_parts(&self) -> RowIter<'_, ()> {
        rows(std::iter::empty())
    }
    fn row_count(&self) -> StateResult<u64> {
        let tables = [
            self.entries.len(),
            self.accounts.len(),
            self.balances.len(),
            self.applications.len(),
            self.credentials.len(),
            self.reservations.len(),
            self.requests.len(),
            self.archived.len(),
            self.granted.len(),
        ];
        // The heads are read as rows, too.
        let heads = AuditSource::heads(self)?.count();
        Ok((tables.into_iter().sum::<usize>() + heads) as u64)
    }
    fn answers(&self) -> RowIter<'_, ()> {
        rows(std::iter::empty())
    }
    fn index_rows(&self) -> RowIter<'_, ()> {
        rows(std::iter::empty())
    }
    fn recent_balances(&self, account: AccountId) -> StateResult<Option<Balances>> {
        let own = |entry: &&JournalEntry| entry.account == account;
        Ok(self.entries.iter().rfind(own).map(|entry| entry.after))
    }
    fn account(&self, id: AccountId) -> StateResult<Option<Account>> {
        LedgerState::account(self, id)
    }
    fn balances(&self, id: AccountId) -> StateResult<Balances> {
        LedgerState::balances(self, id)
    }
    fn application(&self, id: ApplicationId) -> StateResult<Option<Application>> {
        LedgerState::application(self, id)
    }
    fn credential_by_digest(&self, digest: &[u8; 32]) -> StateResult<Option<Credential>> {
        LedgerState::credential_by_digest(self, digest)
    }
    fn adjustment(&self, account: AccountId, reference: &str) -> StateResult<Option<Adjustment>> {
        LedgerState::adjustment(self, account, reference)
    }
    fn request(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>> {
        Ok(self.requests.get(key).or_else(|| self.archived.get(key)).cloned())
    }
    fn reservation(&self, key: &RequestKey) -> StateResult<Option<Reservation>> {
        LedgerState::reservation(self, key)
    }
    fn entry(&self, chain: JournalChain, sequence: u64) -> StateResult<Option<JournalEntry>> {
        let mut own = self.entries.iter().filter(|entry| self.chain_of(entry.account) == chain);
        Ok(own.find(|entry| entry.sequence == sequence).cloned())
    }
    fn entry_of(&self, account: AccountId, until: u64) -> StateResult<Option<JournalEntry>> {
        let mut own =
            self.entries.iter().filter(|entry| entry.account == account && entry.sequence <= until);
        Ok(own.next_back().cloned())
    }
}

impl LedgerState for MemoryState {
    fn account(&self, id: AccountId) -> StateResult<Option<Account>> {
        Ok(self.accounts.get(&id).cloned())
    }
    fn put_account(&mut self, account: &Account) -> StateResult {
        self.accounts.insert(account.id, account.clone());
        Ok(())
    }
    fn balances(&self, id: AccountId) -> StateResult<Balances> {
        Ok(self.balances.get(&id).copied().unwrap_or_default())
    }
    fn put_balances(&mut self, id: AccountId, balances: &Balances) -> StateResult {
        self.balances.insert(id, *balances);
        Ok(())
    }
    fn application(&self, id: ApplicationId) -> StateResult<Option<Application>> {
        Ok(self.applications.get(&id).cloned())
    }
    fn put_application(&mut self, application: &Application) -> StateResult {
        self.applications.insert(application.id, application.clone());
        Ok(())
    }
    fn credential(&self, id: CredentialId) -> StateResult<Option<Credential>> {
        Ok(self.credentials.get(&id).cloned())
    }
    fn credential_by_digest(&self, digest: &[u8; 32]) -> StateResult<Option<Credential>> {
        let mut all = self.credentials.values();
        Ok(all.find(|credential| credential.digest == *digest).cloned())
    }
    fn put_credential(&mut self, credential: &Credential) -> StateResult {
        self.credentials.insert(credential.id, credential.clone());
        Ok(())
    }
    fn adjustment(&self, account: AccountId, reference: &str) -> StateResult<Option<Adjustment>> {
        Ok(self.granted.get(&(account, reference.to_owned())).copied())
    }
    fn put_adjustment(
        &mut self,
        account: AccountId,
        reference: &str,
        granted: Adjustment,
    ) -> StateResult {
        self.granted.insert((account, reference.to_owned()), granted);
        Ok(())
    }
    fn request(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>> {
        Ok(self.requests.get(key).cloned())
    }
    fn archived(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>> {
        Ok(self.archived.get(key).cloned())
    }
    fn put_request(&mut self, record: &RequestRecord) -> StateResult {
        self.requests.insert(record.key, record.clone());
        Ok(())
    }
    fn remove_request(&mut self, key: &RequestKey) -> StateResult {
        self.requests.remove(key);
        Ok(())
    }
    fn reservation(&self, key: &RequestKey) -> StateResult<Option<Reservation>> {
        Ok(self.reservations.get(key).copied())
    }
    fn put_reservation(&mut self, reservation: &Reservation) -> StateResult {
        self.reservations.insert(reservation.key, *reservation);
        Ok(())
    }
    fn remove_reservation(&mut self, key: &RequestKey) -> StateResult {
        self.reservations.remove(key);
        Ok(())
    }
    fn foreign_reservations(&self, boot: BootId, limit: usize) -> StateResult<Vec<Reservation>> {
        let mut foreign: Vec<_> =
            self.reservations.values().filter(|open| open.boot != boot).copied().collect();
        // A stored ledger finds them in this order, because all scopes of an id lie together.
        foreign.sort_by_key(|open| (open.key.account, open.key.request, open.key.application));
        foreign.truncate(limit);
        Ok(foreign)
    }
    fn crashes(&self, account: AccountId, fingerprint: &[u8; 32]) -> StateResult<Option<Crashes>> {
        Ok(self.crashes.get(&(account, *fingerprint)).copied())
    }
    fn put_crashes(
        &mut self,
        account: AccountId,
        fingerprint: &[u8; 32],
        crashes: Crashes,
    ) -> StateResult {
        self.crashes.insert((account, *fingerprint), crashes);
        Ok(())
    }
    fn remove_crashes(&mut self, account: AccountId, fingerprint: &[u8; 32]) -> StateResult {
        self.crashes.remove(&(account, *fingerprint));
        Ok(())
    }
    fn head(&self, account: AccountId) -> StateResult<JournalHead> {
        let mut own = self.entries.iter().rev();
        let last = own.find(|entry| !self.chain_per_account || entry.account == account);
        Ok(last.map_or(JournalHead::default(), |entry| JournalHead {
            sequence: entry.sequence,
            hash: entry.hash,
        }))
    }
    fn append(&mut self, entry: &JournalEntry) -> StateResult {
        self.entries.push(entry.clone());
        Ok(())
    }
}

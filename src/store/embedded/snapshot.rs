//! Reads: one consistent view of the ledger, never in the way of the writer.

use super::tables::{self, Definition, ReadOnly};
use crate::ids::{AccountId, ApplicationId, CredentialId, RequestId};
use crate::ledger::audit::AuditSource;
use crate::ledger::state::{Crashes, Reservation, StateResult};
use crate::ledger::{
    Account, Application, Balances, Credential, JournalEntry, RequestKey, RequestRecord,
};
use crate::store::StoreResult;
use redb::ReadTransaction;
use std::collections::BTreeMap;
use std::ops::Bound;

/// A read transaction.
pub struct Snapshot {
    pub(in crate::store) ledger: ReadTransaction,
    pub(in crate::store) bodies: ReadTransaction,
}

impl Snapshot {
    pub fn account(&self, id: AccountId) -> StoreResult<Option<Account>> {
        Ok(AuditSource::account(self, id)?)
    }

    pub fn accounts(&self) -> StoreResult<Vec<Account>> {
        self.all(tables::ACCOUNTS)
    }

    /// Zero for an account that never had any.
    pub fn balances(&self, id: AccountId) -> StoreResult<Balances> {
        Ok(AuditSource::balances(self, id)?)
    }

    pub fn credential_by_digest(&self, digest: &[u8; 32]) -> StoreResult<Option<Credential>> {
        Ok(AuditSource::credential_by_digest(self, digest)?)
    }

    pub fn credential(&self, id: CredentialId) -> StoreResult<Option<Credential>> {
        let credentials = self.table(tables::CREDENTIALS)?;
        Ok(tables::get(&credentials, id.0.as_bytes())?)
    }

    pub fn credentials(&self, account: AccountId) -> StoreResult<Vec<Credential>> {
        let mut credentials: Vec<Credential> = self.all(tables::CREDENTIALS)?;
        credentials.retain(|credential| credential.account == account);
        Ok(credentials)
    }

    pub fn application(&self, id: ApplicationId) -> StoreResult<Option<Application>> {
        Ok(AuditSource::application(self, id)?)
    }

    pub fn applications(&self, account: AccountId) -> StoreResult<Vec<Application>> {
        let mut applications: Vec<Application> = self.all(tables::APPLICATIONS)?;
        applications.retain(|application| application.account == account);
        Ok(applications)
    }

    /// The request, be it live, recent or archived.
    pub fn request(&self, key: &RequestKey) -> StoreResult<Option<RequestRecord>> {
        Ok(AuditSource::request(self, key)?)
    }

    /// All of an account's requests with this id, over every scope (account keys may read its
    /// applications' requests).
    pub fn requests_by_id(
        &self,
        account: AccountId,
        request: RequestId,
    ) -> StoreResult<Vec<RequestRecord>> {
        self.requests_under(&tables::request_prefix(account, request))
    }

    /// The crashes that an input of this account was running in.
    pub fn crashes(
        &self,
        account: AccountId,
        fingerprint: &[u8; 32],
    ) -> StoreResult<Option<Crashes>> {
        let crashes = self.table(tables::CRASHES)?;
        Ok(tables::get(&crashes, &tables::crash_key(account, fingerprint))?)
    }

    /// Newest last.
    pub fn requests(&self, account: AccountId) -> StoreResult<Vec<RequestRecord>> {
        let mut records = self.requests_under(account.0.as_bytes())?;
        records.sort_by_key(|record| record.attempts.first().map(|first| first.created_at));
        Ok(records)
    }

    /// Every queued and running request.
    pub fn live_requests(&self) -> StoreResult<Vec<RequestRecord>> {
        let open: Vec<Reservation> = self.all(tables::RESERVATIONS)?;
        let requests = self.table(tables::REQUESTS)?;
        let records =
            open.iter().map(|open| tables::get(&requests, &tables::request_key(&open.key)));
        Ok(records.filter_map(Result::transpose).collect::<StateResult<_>>()?)
    }

    /// Every queued and running request made with this credential.
    pub fn live_requests_of(&self, credential: CredentialId) -> StoreResult<Vec<RequestRecord>> {
        let mut records = self.live_requests()?;
        records.retain(|record| record.latest().credential == credential);
        Ok(records)
    }

    /// Up to `limit` entries of an account's journal after sequence `after`, oldest first.
    pub fn entries(
        &self,
        account: AccountId,
        after: u64,
        limit: usize,
    ) -> StoreResult<Vec<JournalEntry>> {
        let places = self.table(tables::ENTRIES_BY_ACCOUNT)?;
        let (from, to) = (tables::entry_key(account, after), tables::entry_key(account, u64::MAX));
        let places =
            tables::range::<()>(&places, (Bound::Excluded(&from[..]), Bound::Included(&to[..])))?;
        let entries = self.table(tables::ENTRIES)?;
        let found = places.take(limit).map(|place| {
            let (place, ()) = place?;
            tables::get(&entries, place.get(16..).unwrap_or_default())
        });
        Ok(found.filter_map(Result::transpose).collect::<StateResult<_>>()?)
    }

    pub(in crate::store) fn table(&self, table: Definition) -> StateResult<ReadOnly> {
        tables::open(&self.ledger, table)
    }

    pub(in crate::store) fn archive(&self) -> StateResult<ReadOnly> {
        tables::open(&self.bodies, tables::ARCHIVE)
    }

    fn all<T: super::codec::StoredField>(&self, table: Definition) -> StoreResult<Vec<T>> {
        let table = self.table(table)?;
        let rows = tables::under(&table, b"")?.map(|row| row.map(|(_, row)| row));
        Ok(rows.collect::<StateResult<_>>()?)
    }

    /// Recent and archived requests whose keys begin with `prefix`, each once.
    fn requests_under(&self, prefix: &[u8]) -> StoreResult<Vec<RequestRecord>> {
        let mut found = BTreeMap::new();
        for table in [self.archive()?, self.table(tables::REQUESTS)?] {
            for row in tables::under::<RequestRecord>(&table, prefix)? {
                found.extend([row?]);
            }
        }
        Ok(found.into_values().collect())
    }
}

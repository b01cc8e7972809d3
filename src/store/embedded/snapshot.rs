//! Reads: one consistent view of both files. It never waits for the writer, nor the writer for it.

use super::codec::StoredField;
use super::tables::{self, Definition, ReadOnly};
use crate::ids::{AccountId, ApplicationId, CredentialId, RequestId};
use crate::ledger::audit::AuditSource;
use crate::ledger::state::{Crashes, Reservation, StateResult};
use crate::ledger::{
    Account, Application, Balances, Credential, JournalEntry, RequestKey, RequestRecord,
};
use crate::store::StoreError;
use crate::store::backend::{ReadFuture, Snapshot};
use redb::ReadTransaction;
use std::collections::BTreeMap;
use std::future;
use std::ops::Bound;

/// A read transaction of each file.
pub(super) struct EmbeddedSnapshot {
    pub ledger: ReadTransaction,
    pub bodies: ReadTransaction,
}

/// A result that is ready already. A look-up takes a few microseconds, less than handing it to
/// another thread would, so it runs on the caller's thread.
pub(super) fn ready<'a, T: Send + 'a>(result: StateResult<T>) -> ReadFuture<'a, T> {
    Box::pin(future::ready(result.map_err(StoreError::from)))
}

impl Snapshot for EmbeddedSnapshot {
    fn account(&self, id: AccountId) -> ReadFuture<'_, Option<Account>> {
        ready(AuditSource::account(self, id))
    }

    fn accounts(&self) -> ReadFuture<'_, Vec<Account>> {
        ready(self.all(tables::ACCOUNTS))
    }

    fn balances(&self, id: AccountId) -> ReadFuture<'_, Balances> {
        ready(AuditSource::balances(self, id))
    }

    fn credential(&self, id: CredentialId) -> ReadFuture<'_, Option<Credential>> {
        ready(self.row(tables::CREDENTIALS, id.0.as_bytes()))
    }

    fn credentials(&self, account: AccountId) -> ReadFuture<'_, Vec<Credential>> {
        ready(self.all_where(tables::CREDENTIALS, |row: &Credential| row.account == account))
    }

    fn application(&self, id: ApplicationId) -> ReadFuture<'_, Option<Application>> {
        ready(AuditSource::application(self, id))
    }

    fn applications(&self, account: AccountId) -> ReadFuture<'_, Vec<Application>> {
        ready(self.all_where(tables::APPLICATIONS, |row: &Application| row.account == account))
    }

    fn request(&self, key: &RequestKey) -> ReadFuture<'_, Option<RequestRecord>> {
        ready(AuditSource::request(self, key))
    }

    fn requests_by_id(
        &self,
        account: AccountId,
        request: RequestId,
    ) -> ReadFuture<'_, Vec<RequestRecord>> {
        ready(self.requests_under(&tables::request_prefix(account, request)))
    }

    fn requests(&self, account: AccountId) -> ReadFuture<'_, Vec<RequestRecord>> {
        ready(self.requests_under(account.0.as_bytes()).map(|mut records| {
            records.sort_by_key(|record| record.attempts.first().map(|first| first.created_at));
            records
        }))
    }

    fn live_requests(&self) -> ReadFuture<'_, Vec<RequestRecord>> {
        ready(self.reserved_requests())
    }

    fn crashes(
        &self,
        account: AccountId,
        fingerprint: &[u8; 32],
    ) -> ReadFuture<'_, Option<Crashes>> {
        ready(self.row(tables::CRASHES, &tables::crash_key(account, fingerprint)))
    }

    fn entries(
        &self,
        account: AccountId,
        after: u64,
        limit: usize,
    ) -> ReadFuture<'_, Vec<JournalEntry>> {
        ready(self.entries_of(account, after, limit))
    }
}

impl EmbeddedSnapshot {
    pub(super) fn credential_and_account(
        &self,
        digest: &[u8; 32],
    ) -> StateResult<Option<(Credential, Account)>> {
        let Some(credential) = AuditSource::credential_by_digest(self, digest)? else {
            return Ok(None);
        };
        let account = AuditSource::account(self, credential.account)?;
        Ok(account.map(|account| (credential, account)))
    }

    pub(super) fn table(&self, table: Definition) -> StateResult<ReadOnly> {
        tables::open(&self.ledger, table)
    }

    pub(super) fn archive(&self) -> StateResult<ReadOnly> {
        tables::open(&self.bodies, tables::ARCHIVE)
    }

    pub(super) fn row<T: StoredField>(
        &self,
        table: Definition,
        key: &[u8],
    ) -> StateResult<Option<T>> {
        tables::get(&self.table(table)?, key)
    }

    fn all<T: StoredField>(&self, table: Definition) -> StateResult<Vec<T>> {
        self.all_where(table, |_| true)
    }

    fn all_where<T: StoredField>(
        &self,
        table: Definition,
        wanted: impl Fn(&T) -> bool,
    ) -> StateResult<Vec<T>> {
        let rows = tables::under(&self.table(table)?, b"")?.map(|row| row.map(|(_, row)| row));
        rows.filter(|row| row.as_ref().map_or(true, &wanted)).collect()
    }

    fn reserved_requests(&self) -> StateResult<Vec<RequestRecord>> {
        let open: Vec<Reservation> = self.all(tables::RESERVATIONS)?;
        let requests = self.table(tables::REQUESTS)?;
        let records =
            open.iter().map(|open| tables::get(&requests, &tables::request_key(&open.key)));
        records.filter_map(Result::transpose).collect()
    }

    fn entries_of(
        &self,
        account: AccountId,
        after: u64,
        limit: usize,
    ) -> StateResult<Vec<JournalEntry>> {
        let places = self.table(tables::ENTRIES_BY_ACCOUNT)?;
        let (from, to) = (tables::entry_key(account, after), tables::entry_key(account, u64::MAX));
        let places =
            tables::range::<()>(&places, (Bound::Excluded(&from[..]), Bound::Included(&to[..])))?;
        let entries = self.table(tables::ENTRIES)?;
        let found = places.take(limit).map(|place| {
            let (place, ()) = place?;
            tables::get(&entries, place.get(16..).unwrap_or_default())
        });
        found.filter_map(Result::transpose).collect()
    }

    /// Recent and archived requests whose keys begin with `prefix`, each once.
    fn requests_under(&self, prefix: &[u8]) -> StateResult<Vec<RequestRecord>> {
        let mut found = BTreeMap::new();
        for table in [self.archive()?, self.table(tables::REQUESTS)?] {
            for row in tables::under::<RequestRecord>(&table, prefix)? {
                found.extend([row?]);
            }
        }
        Ok(found.into_values().collect())
    }
}

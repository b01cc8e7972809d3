//! Reads: one consistent view of both files. It never waits for the writer, nor the writer for it.

use super::disk::CONTRADICTION;
use super::files::Files;
use super::segment_shelf::SegmentShelf;
use super::tables::{self, Definition, OrFault, ReadOnly};
use crate::StoreError;
use crate::backend::{ReadFuture, Snapshot};
use crate::codec::StoredField;
use cresset_base::{AccountId, ApplicationId, CredentialId, RequestId};
use cresset_ledger::{
    Account, Application, Balances, Crashes, Credential, JournalEntry, RequestKey, RequestRecord,
    Reservation, StateError, StateResult,
};
use redb::{ReadTransaction, ReadableDatabase};
use std::collections::BTreeMap;
use std::future;
use std::ops::Bound;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use uuid::Uuid;

/// A read transaction of each file.
pub(super) struct EmbeddedSnapshot {
    pub ledger: ReadTransaction,
    pub bodies: ReadTransaction,
    /// Closed parts of the journal; a backup has none.
    pub segments: Option<Arc<SegmentShelf>>,
}

impl Files {
    pub(super) fn snapshot(&self) -> StateResult<EmbeddedSnapshot> {
        // The ledger is read first, so that a request on its way to the archive is seen in at least
        // one of the two files.
        let ledger = self.ledger.begin_read().or_fault()?;
        let bodies = self.bodies.begin_read().or_fault()?;
        Ok(EmbeddedSnapshot { ledger, bodies, segments: Some(Arc::clone(&self.segments)) })
    }
}

/// A result that is ready already. A look-up takes a few microseconds, less than handing it to
/// another thread would, so it runs on the caller's thread.
pub(super) fn ready<'a, T: Send + 'a>(read: impl FnOnce() -> StateResult<T>) -> ReadFuture<'a, T> {
    // The database panics on some damaged pages.
    let result = panic::catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|_| Err(StateError::Corrupt(CONTRADICTION.into())));
    Box::pin(future::ready(result.map_err(StoreError::from)))
}

impl Snapshot for EmbeddedSnapshot {
    fn account(&self, id: AccountId) -> ReadFuture<'_, Option<Account>> {
        ready(|| self.row(tables::ACCOUNTS, id.0.as_bytes()))
    }

    fn accounts(&self, after: Option<AccountId>, limit: usize) -> ReadFuture<'_, Vec<Account>> {
        ready(|| self.rows_after(tables::ACCOUNTS, after.map(|id| id.0), limit))
    }

    fn balances(&self, id: AccountId) -> ReadFuture<'_, Balances> {
        ready(|| Ok(self.row(tables::BALANCES, id.0.as_bytes())?.unwrap_or_default()))
    }

    fn credential(&self, id: CredentialId) -> ReadFuture<'_, Option<Credential>> {
        ready(|| self.row(tables::CREDENTIALS, id.0.as_bytes()))
    }

    fn credentials(
        &self,
        after: Option<CredentialId>,
        limit: usize,
    ) -> ReadFuture<'_, Vec<Credential>> {
        ready(|| self.rows_after(tables::CREDENTIALS, after.map(|id| id.0), limit))
    }

    fn application(&self, id: ApplicationId) -> ReadFuture<'_, Option<Application>> {
        ready(|| self.row(tables::APPLICATIONS, id.0.as_bytes()))
    }

    fn applications(
        &self,
        after: Option<ApplicationId>,
        limit: usize,
    ) -> ReadFuture<'_, Vec<Application>> {
        ready(|| self.rows_after(tables::APPLICATIONS, after.map(|id| id.0), limit))
    }

    fn request(&self, key: &RequestKey) -> ReadFuture<'_, Option<RequestRecord>> {
        ready(|| self.request_at(key))
    }

    fn requests_by_id(
        &self,
        account: AccountId,
        request: RequestId,
    ) -> ReadFuture<'_, Vec<RequestRecord>> {
        ready(|| self.requests_under(&tables::request_prefix(account, request)))
    }

    fn live_requests(&self) -> ReadFuture<'_, Vec<RequestRecord>> {
        ready(|| self.reserved_requests())
    }

    fn crashes(
        &self,
        account: AccountId,
        fingerprint: &[u8; 32],
    ) -> ReadFuture<'_, Option<Crashes>> {
        ready(|| self.row(tables::CRASHES, &tables::crash_key(account, fingerprint)))
    }

    fn entries(
        &self,
        account: AccountId,
        after: u64,
        limit: usize,
    ) -> ReadFuture<'_, Vec<JournalEntry>> {
        ready(|| self.entries_of(account, after, limit))
    }

    /// The journal is one chain over all accounts.
    fn last_sequence(&self, _: AccountId) -> ReadFuture<'_, u64> {
        ready(|| Ok(self.head()?.sequence))
    }

    fn answer_bytes(&self, account: AccountId) -> ReadFuture<'_, u64> {
        ready(|| {
            let sums = tables::open(&self.bodies, tables::ANSWER_BYTES)?;
            Ok(tables::get(&sums, account.0.as_bytes())?.unwrap_or_default())
        })
    }
}

impl EmbeddedSnapshot {
    pub(super) fn credential_and_account(
        &self,
        digest: &[u8; 32],
    ) -> StateResult<Option<(Credential, Account)>> {
        let Some(credential) = self.credential_with(digest)? else {
            return Ok(None);
        };
        let account = self.row(tables::ACCOUNTS, credential.account.0.as_bytes())?;
        Ok(account.map(|account| (credential, account)))
    }

    /// The credential whose secret has this digest.
    pub(super) fn credential_with(&self, digest: &[u8; 32]) -> StateResult<Option<Credential>> {
        let Some(id) = self.row::<CredentialId>(tables::DIGESTS, digest)? else {
            return Ok(None);
        };
        self.row(tables::CREDENTIALS, id.0.as_bytes())
    }

    /// The request with this key, recent or archived.
    pub(super) fn request_at(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>> {
        let key = tables::request_key(key);
        match self.row(tables::REQUESTS, &key)? {
            Some(record) => Ok(Some(record)),
            None => tables::get(&self.archive()?, &key),
        }
    }

    pub(super) fn table(&self, table: Definition) -> StateResult<ReadOnly> {
        tables::open(&self.ledger, table)
    }

    pub(super) fn archive(&self) -> StateResult<ReadOnly> {
        tables::open(&self.bodies, tables::ARCHIVE)
    }

    pub(super) fn archive_index(&self) -> StateResult<ReadOnly> {
        tables::open(&self.bodies, tables::ARCHIVE_DUE)
    }

    pub(super) fn row<T: StoredField>(
        &self,
        table: Definition,
        key: &[u8],
    ) -> StateResult<Option<T>> {
        tables::get(&self.table(table)?, key)
    }

    /// Up to `limit` rows after the one with the id `after`, in the order of their ids.
    fn rows_after<T: StoredField>(
        &self,
        table: Definition,
        after: Option<Uuid>,
        limit: usize,
    ) -> StateResult<Vec<T>> {
        let from =
            after.as_ref().map_or(Bound::Unbounded, |id| Bound::Excluded(&id.as_bytes()[..]));
        let rows = tables::range(&self.table(table)?, (from, Bound::Unbounded))?;
        rows.take(limit).map(|row| row.map(|(_, row)| row)).collect()
    }

    fn reserved_requests(&self) -> StateResult<Vec<RequestRecord>> {
        let open = self.table(tables::RESERVATIONS)?;
        let requests = self.table(tables::REQUESTS)?;
        let records = tables::under::<Reservation>(&open, b"")?
            .map(|row| tables::get(&requests, &tables::request_key(&row?.1.key)));
        records.filter_map(Result::transpose).collect()
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

//! Reads: each snapshot is a transaction of its own that sees one state of the database.

use super::failure::Failure;
use super::keys::{application_column, request_at};
use super::pool::{PooledSession, SessionPool};
use super::rows::{AccountRow, content};
use super::session::{Ask, DatabaseSession, QueryAnswer};
use cresset_base::{AccountId, ApplicationId, CredentialId, RequestId, UnixMillis};
use cresset_ledger::{
    Account, Application, Balances, Crashes, Credential, JournalEntry, RequestKey, RequestRecord,
    StateResult,
};
use cresset_store::codec::StoredField;
use cresset_store::rows::{crash_key, entry_key, request_key};
use cresset_store::{ReadFuture, Snapshot, StoredBody};
use std::sync::Arc;
use tokio_postgres::Row;
use uuid::Uuid;

const BEGIN: &str = "begin isolation level repeatable read, read only";
/// The first statement of a transaction decides what it sees.
const LOOK: &str = "select 1";

const ACCOUNT: &str = "select id, row from accounts where id = $1";
const ACCOUNTS: &str = "select id, row from accounts where $1 or id > $2 order by id limit $3";
const CREDENTIAL: &str = "select id, row from credentials where id = $1";
const CREDENTIALS: &str =
    "select id, row from credentials where $1 or id > $2 order by id limit $3";
const APPLICATION: &str = "select id, row from applications where id = $1";
const APPLICATIONS: &str =
    "select id, row from applications where $1 or id > $2 order by id limit $3";
const REQUEST: &str = "select account, request, application, row from requests \
    where account = $1 and request = $2 and application = $3";
const REQUESTS_BY_ID: &str = "select account, request, application, row from requests \
    where account = $1 and request = $2 order by application";
const LIVE: &str = "select account, request, application, q.row from reservations \
    join requests q using (account, request, application) order by account, request, application";
const CRASHES: &str = "select row from crashes where account = $1 and fingerprint = $2";
const ENTRIES: &str = "select sequence, row from entries where account = $1 and sequence > $2 \
    order by sequence limit $3";
const LAST_SEQUENCE: &str = "select sequence from accounts where id = $1";
const ANSWER_BYTES: &str = "select answer_bytes from accounts where id = $1";
const BODY: &str = "select account, request, application, row from bodies \
    where account = $1 and request = $2 and application = $3 and expires_at > $4";

pub(super) struct DatabaseSnapshot {
    /// It is there until the snapshot is dropped.
    session: Option<PooledSession>,
}

/// A snapshot of what is committed now.
pub(super) async fn take(pool: &Arc<SessionPool>) -> Result<DatabaseSnapshot, Failure> {
    let session = pool.take().await?;
    session.pipeline(vec![Ask::new(BEGIN), Ask::new(LOOK)]).await?;
    Ok(DatabaseSnapshot { session: Some(session) })
}

impl Drop for DatabaseSnapshot {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            session.end_transaction();
        }
    }
}

impl DatabaseSnapshot {
    async fn ask(&self, ask: Ask) -> Result<QueryAnswer, Failure> {
        let session = self.session.as_ref().expect("invariant: it is there until the drop");
        session.ask(ask).await
    }

    /// The rows as `read` makes them of what `ask` returns.
    fn rows<T: Send + 'static>(
        &self,
        ask: Ask,
        read: impl Fn(&Row) -> StateResult<T> + Send + 'static,
    ) -> ReadFuture<'_, Vec<T>> {
        Box::pin(async move {
            let answer = self.ask(ask).await?;
            Ok(answer.rows.iter().map(read).collect::<StateResult<_>>()?)
        })
    }

    /// The first of the rows.
    fn row<T: Send + 'static>(
        &self,
        ask: Ask,
        read: impl Fn(&Row) -> StateResult<T> + Send + 'static,
    ) -> ReadFuture<'_, Option<T>> {
        let rows = self.rows(ask, read);
        Box::pin(async { Ok(rows.await?.into_iter().next()) })
    }
}

impl Snapshot for DatabaseSnapshot {
    fn account(&self, id: AccountId) -> ReadFuture<'_, Option<Account>> {
        self.row(Ask::new(ACCOUNT).with(id.0), account)
    }

    fn accounts(&self, after: Option<AccountId>, limit: usize) -> ReadFuture<'_, Vec<Account>> {
        self.rows(page(ACCOUNTS, after.map(|id| id.0), limit), account)
    }

    fn balances(&self, id: AccountId) -> ReadFuture<'_, Balances> {
        let found = self.row(Ask::new(ACCOUNT).with(id.0), by_id::<AccountRow>);
        Box::pin(async { Ok(found.await?.map(|row| row.balances).unwrap_or_default()) })
    }

    fn credential(&self, id: CredentialId) -> ReadFuture<'_, Option<Credential>> {
        self.row(Ask::new(CREDENTIAL).with(id.0), by_id)
    }

    fn credentials(
        &self,
        after: Option<CredentialId>,
        limit: usize,
    ) -> ReadFuture<'_, Vec<Credential>> {
        self.rows(page(CREDENTIALS, after.map(|id| id.0), limit), by_id)
    }

    fn application(&self, id: ApplicationId) -> ReadFuture<'_, Option<Application>> {
        self.row(Ask::new(APPLICATION).with(id.0), by_id)
    }

    fn applications(
        &self,
        after: Option<ApplicationId>,
        limit: usize,
    ) -> ReadFuture<'_, Vec<Application>> {
        self.rows(page(APPLICATIONS, after.map(|id| id.0), limit), by_id)
    }

    fn request(&self, key: &RequestKey) -> ReadFuture<'_, Option<RequestRecord>> {
        self.row(of_request(REQUEST, key), by_request)
    }

    fn requests_by_id(
        &self,
        account: AccountId,
        request: RequestId,
    ) -> ReadFuture<'_, Vec<RequestRecord>> {
        self.rows(Ask::new(REQUESTS_BY_ID).with(account.0).with(request.0), by_request)
    }

    fn live_requests(&self) -> ReadFuture<'_, Vec<RequestRecord>> {
        self.rows(Ask::new(LIVE), by_request)
    }

    fn crashes(
        &self,
        account: AccountId,
        fingerprint: &[u8; 32],
    ) -> ReadFuture<'_, Option<Crashes>> {
        let key = crash_key(account, fingerprint);
        let ask = Ask::new(CRASHES).with(account.0).with(fingerprint.to_vec());
        self.row(ask, move |row| content(row, 0, &key))
    }

    fn entries(
        &self,
        account: AccountId,
        after: u64,
        limit: usize,
    ) -> ReadFuture<'_, Vec<JournalEntry>> {
        let ask = Ask::new(ENTRIES).with(account.0).with(signed(after)).with(signed(limit as u64));
        self.rows(ask, move |row| entry(account, row))
    }

    fn last_sequence(&self, account: AccountId) -> ReadFuture<'_, u64> {
        let found = self.row(Ask::new(LAST_SEQUENCE).with(account.0), |row| Ok(count(row)));
        Box::pin(async { Ok(found.await?.unwrap_or_default()) })
    }

    fn answer_bytes(&self, account: AccountId) -> ReadFuture<'_, u64> {
        let found = self.row(Ask::new(ANSWER_BYTES).with(account.0), |row| Ok(count(row)));
        Box::pin(async { Ok(found.await?.unwrap_or_default()) })
    }
}

fn count(row: &Row) -> u64 {
    u64::try_from(row.get::<_, i64>(0)).unwrap_or_default()
}

/// The stored answer of a request, unless it has expired at `now`.
pub(super) async fn body(
    session: &DatabaseSession,
    key: &RequestKey,
    now: UnixMillis,
) -> StateResult<Option<StoredBody>> {
    let answer = session.ask(of_request(BODY, key).with(signed(now.0))).await?;
    answer.rows.first().map(by_request).transpose()
}

/// A number as the database has it. Larger ones are beyond all that is stored.
pub(super) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn of_request(sql: &'static str, key: &RequestKey) -> Ask {
    let application = application_column(key.application);
    Ask::new(sql).with(key.account.0).with(key.request.0).with(application)
}

fn page(sql: &'static str, after: Option<Uuid>, limit: usize) -> Ask {
    Ask::new(sql).with(after.is_none()).with(after.unwrap_or_default()).with(signed(limit as u64))
}

/// A row behind its id.
pub(super) fn by_id<T: StoredField>(row: &Row) -> StateResult<T> {
    content(row, 1, row.get::<_, Uuid>(0).as_bytes())
}

fn account(row: &Row) -> StateResult<Account> {
    by_id::<AccountRow>(row).map(|row| row.account)
}

/// A row behind its request key.
pub(super) fn by_request<T: StoredField>(row: &Row) -> StateResult<T> {
    content(row, 3, &request_key(&request_at(row, 0)))
}

/// An entry of an account behind its sequence.
pub(super) fn entry(account: AccountId, row: &Row) -> StateResult<JournalEntry> {
    let sequence = u64::try_from(row.get::<_, i64>(0)).unwrap_or_default();
    content(row, 1, &entry_key(account, sequence))
}

//! Connections to the database: how they are made and set up, and how several statements share one
//! round trip.

use super::PostgresConfig;
use super::driver::within;
use super::failure::Failure;
use super::tls::DatabaseTls;
use futures_util::future::join_all;
use futures_util::{StreamExt, TryStreamExt};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio_postgres::config::TargetSessionAttrs;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{AsyncMessage, Client, Config, Connection, NoTls, Row, Statement};

/// How long a server may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// How long sent bytes may stay unacknowledged before the connection counts as lost.
const UNACKNOWLEDGED: Duration = Duration::from_secs(10);
const KEEPALIVE: Duration = Duration::from_secs(5);

/// What the session of the writer needs, whatever the database's own settings are. Its transactions
/// hold accounts, so none may stand still. The planner knows nothing of tables that were empty a
/// moment ago, and every statement of the writer is made for an index.
const WRITER: &str = "set client_min_messages = warning; set synchronous_commit = on; \
    set default_transaction_isolation = 'read committed'; set lock_timeout = '2s'; \
    set idle_in_transaction_session_timeout = '1s'; set plan_cache_mode = force_generic_plan; \
    set enable_seqscan = off; set enable_hashjoin = off; set enable_mergejoin = off; set jit = off";
/// Reads hold nobody up, but one that stands still keeps the database from removing old rows.
const READER: &str = "set client_min_messages = warning; set synchronous_commit = on; \
    set statement_timeout = '30s'; set idle_in_transaction_session_timeout = '60s'; set jit = off";
/// An audit takes as long as there are rows, and rests in between; so does a move.
const AUDITOR: &str = "set client_min_messages = warning; set synchronous_commit = on; \
    set statement_timeout = 0; set idle_in_transaction_session_timeout = 0; set jit = off";

#[derive(Clone, Copy)]
pub(super) enum SessionKind {
    Writer,
    Reader,
    Auditor,
}

/// Makes sessions.
pub(super) struct Connector {
    config: Config,
    tls: Option<DatabaseTls>,
    pub handle: Handle,
}

impl Connector {
    pub(super) fn new(place: &PostgresConfig, handle: Handle) -> Self {
        let mut config = (*place.server).clone();
        config
            .application_name("cresset")
            .target_session_attrs(TargetSessionAttrs::ReadWrite)
            .connect_timeout(CONNECT)
            .tcp_user_timeout(UNACKNOWLEDGED)
            .keepalives(true)
            .keepalives_idle(KEEPALIVE)
            .keepalives_interval(KEEPALIVE);
        Self { config, tls: place.tls.clone().map(DatabaseTls), handle }
    }

    /// A new session. The threads of the backend drive it, whoever asks for it.
    pub(super) async fn connect(
        self: &Arc<Self>,
        kind: SessionKind,
    ) -> Result<DatabaseSession, Failure> {
        let this = Arc::clone(self);
        let connecting = self.handle.spawn(async move { this.connect_here(kind).await });
        connecting.await.unwrap_or_else(|_| Err(Failure::lost("the node is stopping")))
    }

    async fn connect_here(&self, kind: SessionKind) -> Result<DatabaseSession, Failure> {
        let doubts = Arc::new(AtomicU64::new(0));
        let failed = |error| Failure::connecting(error, &self.config);
        let client = if let Some(tls) = self.tls.clone() {
            let (client, connection) = self.config.connect(tls).await.map_err(failed)?;
            self.handle.spawn(drive(connection, Arc::clone(&doubts)));
            client
        } else {
            let (client, connection) = self.config.connect(NoTls).await.map_err(failed)?;
            self.handle.spawn(drive(connection, Arc::clone(&doubts)));
            client
        };
        client
            .batch_execute(match kind {
                SessionKind::Writer => WRITER,
                SessionKind::Reader => READER,
                SessionKind::Auditor => AUDITOR,
            })
            .await?;
        Ok(DatabaseSession { client, doubts, statements: Mutex::default() })
    }

    /// `work` on a session, or a failure where it takes longer than `most`.
    pub(super) async fn within<T>(
        &self,
        most: Duration,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let done = within(&self.handle, most, work).await;
        done.unwrap_or_else(|| Err(Failure::lost("the database does not answer")))
    }
}

/// Moves the messages of a connection until it ends. Each warning that a commit may not have
/// reached the standbys is counted before the commit itself is told.
async fn drive<S, T>(mut connection: Connection<S, T>, doubts: Arc<AtomicU64>)
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
        let AsyncMessage::Notice(notice) = message else { continue };
        if [SqlState::WARNING, SqlState::ADMIN_SHUTDOWN].contains(notice.code()) {
            tracing::warn!(said = notice.message(), "the database warns");
            doubts.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// A statement with its parameters.
pub(super) struct Ask {
    sql: &'static str,
    parameters: Vec<Box<dyn ToSql + Sync + Send>>,
}

impl Ask {
    pub(super) fn new(sql: &'static str) -> Self {
        Self { sql, parameters: Vec::new() }
    }

    pub(super) fn with(mut self, parameter: impl ToSql + Sync + Send + 'static) -> Self {
        self.parameters.push(Box::new(parameter));
        self
    }
}

/// What a statement returned.
pub(super) struct QueryAnswer {
    pub rows: Vec<Row>,
    /// Rows that it changed.
    pub affected: u64,
}

pub(super) struct DatabaseSession {
    client: Client,
    doubts: Arc<AtomicU64>,
    /// Statements that were prepared in this session, by their text.
    statements: Mutex<HashMap<&'static str, Statement>>,
}

impl DatabaseSession {
    pub(super) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Warnings so far that a commit may not have reached the standbys.
    pub(super) fn doubts(&self) -> u64 {
        self.doubts.load(Ordering::Acquire)
    }

    /// Executes the statements in their order and in one round trip. After one that failed in a
    /// transaction the others fail, too, except a `commit`, which then rolls back and succeeds.
    pub(super) async fn pipeline(&self, asks: Vec<Ask>) -> Result<Vec<QueryAnswer>, Failure> {
        let mut prepared = Vec::with_capacity(asks.len());
        for ask in &asks {
            prepared.push(self.statement(ask.sql).await?);
        }
        // Futures are polled first in their order, and the first poll sends.
        let sent = prepared.iter().zip(&asks).map(|(statement, ask)| self.send(statement, ask));
        join_all(sent).await.into_iter().collect()
    }

    pub(super) async fn ask(&self, ask: Ask) -> Result<QueryAnswer, Failure> {
        let statement = self.statement(ask.sql).await?;
        self.send(&statement, &ask).await
    }

    /// Executes a statement whose text is made here and has no parameters.
    pub(super) async fn text(&self, sql: &str) -> Result<Vec<Row>, Failure> {
        Ok(self.client.query(sql, &[]).await?)
    }

    /// Executes several statements without parameters.
    pub(super) async fn script(&self, sql: &str) -> Result<(), Failure> {
        Ok(self.client.batch_execute(sql).await?)
    }

    async fn send(&self, statement: &Statement, ask: &Ask) -> Result<QueryAnswer, Failure> {
        let parameters = ask.parameters.iter().map(|parameter| &**parameter as &(dyn ToSql + Sync));
        let parameters: Vec<_> = parameters.collect();
        let mut stream = pin!(self.client.query_raw(statement, parameters).await?);
        let rows = stream.as_mut().by_ref().try_collect().await?;
        Ok(QueryAnswer { rows, affected: stream.rows_affected().unwrap_or_default() })
    }

    async fn statement(&self, sql: &'static str) -> Result<Statement, Failure> {
        let known = self.statements.lock().get(sql).cloned();
        if let Some(statement) = known {
            return Ok(statement);
        }
        let statement = self.client.prepare(sql).await?;
        self.statements.lock().insert(sql, statement.clone());
        Ok(statement)
    }
}

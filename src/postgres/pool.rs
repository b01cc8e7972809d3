//! The sessions that answer reads, at most `ledger.connections` of them.

use super::failure::Failure;
use super::session::{Connector, DatabaseSession, SessionKind};
use parking_lot::Mutex;
use std::ops::Deref;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub(super) struct SessionPool {
    connector: Arc<Connector>,
    idle: Mutex<Vec<DatabaseSession>>,
    permits: Arc<Semaphore>,
}

/// A session of the pool. It is closed when it is dropped, because its last statement may still
/// run, and goes back by `give_back`.
pub(super) struct PooledSession {
    pool: Arc<SessionPool>,
    session: Option<DatabaseSession>,
    _permit: OwnedSemaphorePermit,
}

impl SessionPool {
    pub(super) fn new(connector: Arc<Connector>, sessions: usize) -> Self {
        Self { connector, idle: Mutex::default(), permits: Arc::new(Semaphore::new(sessions)) }
    }

    /// Waits for a session that is free.
    pub(super) async fn take(self: &Arc<Self>) -> Result<PooledSession, Failure> {
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let permit = permit.map_err(|_| Failure::lost("the node is stopping"))?;
        let idle = self.idle.lock().pop();
        let session = match idle.filter(|session| !session.is_closed()) {
            Some(session) => session,
            None => self.connector.connect(SessionKind::Reader).await?,
        };
        Ok(PooledSession { pool: Arc::clone(self), session: Some(session), _permit: permit })
    }
}

impl PooledSession {
    /// Keeps the session for the next reader.
    pub(super) fn give_back(mut self) {
        let session = self.session.take().filter(|session| !session.is_closed());
        self.pool.idle.lock().extend(session);
    }

    /// Ends the transaction of the session and keeps it, without waiting for that.
    pub(super) fn end_transaction(self) {
        let handle = self.pool.connector.handle.clone();
        handle.spawn(async move {
            if self.script("rollback").await.is_ok() {
                self.give_back();
            }
        });
    }
}

impl Deref for PooledSession {
    type Target = DatabaseSession;

    fn deref(&self) -> &DatabaseSession {
        self.session.as_ref().expect("invariant: it is there until it is given back")
    }
}

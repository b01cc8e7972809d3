//! The store without its threads: a test takes every step of the writer.

use crate::backend::{Backend, Seal, WriteAction};
use crate::queue::WriteJob;
use crate::writer::Writer;
use crate::{AuditPolicy, Limits, OpenProgress, Store, StoreInner, StoreResult, prepare};
use cresset_base::{Clock, UnixMillis};
use cresset_ledger::Outcome;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;
use tokio::sync::oneshot;

/// A store whose queue nobody empties.
pub struct SteppedStore<B: Backend> {
    pub backend: Arc<B>,
    pub store: Store,
    writer: Writer<B>,
}

impl<B: Backend> SteppedStore<B> {
    pub fn open(backend: B, clock: Arc<dyn Clock>) -> Self {
        let backend = Arc::new(backend);
        let (limits, policy) = (Limits::default(), AuditPolicy::Always);
        let (shared, writer) =
            prepare(&backend, clock, limits, policy, &OpenProgress::default()).unwrap();
        let inner = StoreInner { shared, writer: None, auditor: None, folder: OnceLock::new() };
        Self { backend, store: Store { inner: Arc::new(inner) }, writer }
    }

    /// Applies a command with its body, which a caller waits for.
    pub fn apply(&mut self, action: WriteAction) -> StoreResult<Outcome> {
        let (reply, mut answer) = oneshot::channel();
        self.writer.commit(vec![WriteJob::new(action, Some(reply))]);
        answer.try_recv().unwrap()
    }

    /// What the writer does again and again between its batches.
    pub fn look_at_others(&mut self) {
        self.writer.look_at_others();
    }

    /// What the writer does once a minute with what audits found.
    pub fn seal(&self) {
        self.writer.seal().unwrap();
    }

    pub fn sweep(&mut self) {
        while self.writer.sweep().unwrap() {}
    }

    /// Stops in good order.
    pub fn close(self) {
        self.writer.close();
    }

    /// Opens the backend again where it failed after its last answer.
    pub fn notice_failure(&mut self) {
        let health = &self.store.inner.shared.health;
        let alive = self.backend.transact(0, &[], UnixMillis(0), |_| Ok(()));
        if alive.is_err() && health.reachable() {
            health.disconnect("it failed between two batches");
            self.reconnect();
        }
    }

    /// Waits until the backend is open again.
    pub fn reconnect(&mut self) {
        while !self.store.inner.shared.health.reachable() {
            thread::sleep(Duration::from_millis(2));
            self.writer.reconnect();
        }
    }

    /// Whether another node audits the ledger.
    pub fn do_others_audit(&self) -> bool {
        self.store.inner.shared.others_audit()
    }

    /// Whether an audit of everything is due that was made `interval_ms` ago, or never.
    pub fn owes_full_audit(&self, interval_ms: u64) -> bool {
        self.store.inner.shared.owes_full_audit(interval_ms)
    }

    /// What audits have found sound.
    pub fn due_seal(&self) -> Option<Seal> {
        self.store.inner.shared.due_seal()
    }
}

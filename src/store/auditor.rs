//! The background audit: everything stored is checked again every hour, from a snapshot, beside the writer.

use super::shared::Shared;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const INTERVAL: Duration = Duration::from_hours(1);

/// The auditing thread, which runs until it is dropped.
pub(super) struct Auditor {
    stop: SyncSender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Auditor {
    pub fn start(shared: Arc<Shared>) -> io::Result<Self> {
        let (stop, stopped) = mpsc::sync_channel::<()>(1);
        let thread = thread::Builder::new().name("store-auditor".into());
        let thread = thread.spawn(move || {
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                audit(&shared);
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Auditor {
    fn drop(&mut self) {
        // Refused only when the thread has ended already or was told before.
        let _ = self.stop.try_send(());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the ledger's auditor panicked");
        }
    }
}

fn audit(shared: &Shared) {
    // The database may panic on damaged pages.
    match panic::catch_unwind(AssertUnwindSafe(|| shared.audit())) {
        Ok(Ok(report)) => tracing::info!(entries = report.entries, ok = report.ok, "audited the ledger"),
        Ok(Err(error)) => tracing::warn!(%error, "the ledger could not be audited"),
        Err(_) => shared.health.distrust("reading it for the audit panicked"),
    }
}

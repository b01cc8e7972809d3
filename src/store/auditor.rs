//! The background audit. It reads snapshots beside the writer: new entries every minute, everything
//! every day. It stops at the first violation, which a person has to look into.

#![expect(clippy::disallowed_methods, reason = "the auditor measures the time until its next turn")]

use super::shared::StoreShared;
use crate::ledger::audit::unpaced;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The time between two audits of new entries. It bounds how long a node goes on after a violation.
const NEWS: Duration = Duration::from_mins(1);
/// The time between two audits of everything, which reads both files as a whole.
const EVERYTHING: Duration = Duration::from_hours(24);

/// The auditing thread, which runs until it is dropped.
pub(super) struct Auditor {
    stop: SyncSender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Auditor {
    pub(super) fn start(shared: Arc<StoreShared>) -> io::Result<Self> {
        let (stop, stopped) = mpsc::sync_channel::<()>(1);
        let thread = thread::Builder::new().name("store-auditor".into());
        let thread = thread.spawn(move || {
            // Everything was audited when the ledger was opened.
            let mut last = Instant::now();
            while stopped.recv_timeout(NEWS) == Err(RecvTimeoutError::Timeout)
                && shared.health.trusted().is_ok()
            {
                let whole = last.elapsed() >= EVERYTHING;
                if whole {
                    last = Instant::now();
                }
                audit(&shared, whole);
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Auditor {
    fn drop(&mut self) {
        // The channel refuses this only when the thread has ended or was told before.
        let _ = self.stop.try_send(());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the ledger's auditor panicked");
        }
    }
}

fn audit(shared: &StoreShared, whole: bool) {
    let audit = || {
        if whole {
            shared.audit(&unpaced)
        } else {
            shared.audit_news(&*shared.reader.audit_source()?)
        }
    };
    // The database may panic on damaged pages.
    match panic::catch_unwind(AssertUnwindSafe(audit)) {
        Ok(Ok(report)) => {
            tracing::debug!(whole, entries = report.entries, ok = report.ok, "audited the ledger");
        }
        Ok(Err(error)) => tracing::warn!(%error, "the ledger could not be audited"),
        Err(_) => shared.health.distrust("reading it for the audit panicked"),
    }
}

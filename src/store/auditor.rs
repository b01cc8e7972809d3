//! The background audit. It reads snapshots beside the writer: new entries every minute, everything
//! every day and after a stop that was not orderly. It stops at the first violation, which a person
//! has to look into. Of nodes that share a ledger one audits, and the others take its seals over.

#![expect(clippy::disallowed_methods, reason = "the auditor measures the time until its next turn")]

use super::shared::StoreShared;
use super::{AuditReport, StoreResult};
use cresset_base::lower_thread_priority;
use cresset_ledger::audit::AuditProgress;
use cresset_ledger::{StateError, StateResult};
use std::cell::Cell;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The time between two audits of new entries. It bounds how long a node goes on after a violation.
const NEWS: Duration = Duration::from_mins(1);
/// The time between two audits of everything, milliseconds.
const EVERYTHING_MS: u64 = 24 * 3_600_000;
/// The time until an audit of everything is tried again that the storage did not let end.
const RETRY: Duration = Duration::from_hours(1);
/// Rows read between two looks at the time and at whether to stop: a millisecond or two of work.
const STRIDE: u64 = 256;

/// The auditing thread, which runs until it is dropped.
pub(super) struct Auditor {
    /// The thread ends when this is dropped.
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Auditor {
    pub(super) fn start(shared: Arc<StoreShared>, rows_per_second: u64) -> io::Result<Self> {
        let (turns, stop) = AuditTurns::new(shared, rows_per_second);
        let thread = thread::Builder::new().name("store-auditor".into());
        let thread = thread.spawn(move || turns.run())?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Auditor {
    fn drop(&mut self) {
        drop(self.stop.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the ledger's auditor panicked");
        }
    }
}

/// The turns of the auditing thread.
pub(super) struct AuditTurns {
    shared: Arc<StoreShared>,
    /// It is disconnected when the thread is to end.
    stopped: Receiver<()>,
    rows_per_second: u64,
    /// When new entries are audited next; `None` before the first turn.
    next_news: Cell<Option<Instant>>,
}

impl AuditTurns {
    /// The turns, and what ends them when it is dropped.
    pub(super) fn new(shared: Arc<StoreShared>, rows_per_second: u64) -> (Self, SyncSender<()>) {
        let (stop, stopped) = mpsc::sync_channel(0);
        (Self { shared, stopped, rows_per_second, next_news: Cell::default() }, stop)
    }

    fn run(self) {
        if let Err(error) = lower_thread_priority() {
            tracing::debug!(%error, "the auditor keeps its priority");
        }
        let mut next_whole = Instant::now();
        self.next_news.set(Some(next_whole + NEWS));
        while self.go_on_at(self.next_news.get()) {
            if self.shared.others_audit() {
                self.next_news.set(Some(Instant::now() + NEWS));
            } else {
                self.news();
            }
            self.close_part();
            if self.shared.owes_full_audit(EVERYTHING_MS) && Instant::now() >= next_whole {
                next_whole = Instant::now() + RETRY;
                self.everything();
            }
        }
    }

    /// Waits until `at`; false when the thread is to end.
    fn go_on_at(&self, at: Option<Instant>) -> bool {
        let patience = at.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()));
        self.stopped.recv_timeout(patience) == Err(RecvTimeoutError::Timeout)
            && self.shared.health.trusted().is_ok()
    }

    fn news(&self) {
        self.next_news.set(Some(Instant::now() + NEWS));
        self.audit(false, || {
            let source = self.shared.reader.audit_source()?;
            self.shared.audit_news(&*source, &|progress| self.go_on(progress))
        });
    }

    /// Moves old entries out of the ledger's own file.
    fn close_part(&self) {
        // A copy needs space, and leaving the entries where they are costs nothing new.
        if self.shared.admission_block().is_some() {
            return;
        }
        let close = || self.shared.reader.close_journal_part(&|progress| self.go_on(progress));
        self.outcome("closing a part of the journal", close);
    }

    pub(super) fn everything(&self) {
        let began = Instant::now();
        let keep_pace = |progress: AuditProgress| {
            if !is_look(progress) {
                return Ok(());
            }
            // New entries are audited meanwhile.
            if self.next_news.get().is_some_and(|next| Instant::now() >= next) {
                self.news();
            }
            let spent = progress.done as f64 / self.rows_per_second as f64;
            self.check_on(began + Duration::from_secs_f64(spent))
        };
        self.audit(true, || self.shared.audit(&keep_pace));
    }

    fn go_on(&self, progress: AuditProgress) -> StateResult {
        if is_look(progress) { self.check_on(Instant::now()) } else { Ok(()) }
    }

    /// Waits until `at`, and ends the audit when the thread is to end.
    fn check_on(&self, at: Instant) -> StateResult {
        if self.go_on_at(Some(at)) {
            Ok(())
        } else {
            Err(StateError::Io("the audit was stopped".into()))
        }
    }

    fn audit(&self, whole: bool, audit: impl FnOnce() -> StoreResult<AuditReport>) {
        if let Some(AuditReport { entries, ok, .. }) = self.outcome("auditing it", audit) {
            tracing::debug!(whole, entries, ok, "audited the ledger");
        }
    }

    /// The result of work on the ledger; `None` after a failure, which is logged, and when the
    /// thread is to end.
    fn outcome<T>(&self, doing: &str, work: impl FnOnce() -> StoreResult<T>) -> Option<T> {
        // The database may panic on damaged pages.
        match panic::catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(done)) => return Some(done),
            Ok(Err(_)) if !self.go_on_at(None) => {}
            Ok(Err(error)) => tracing::warn!(%error, doing, "the ledger could not be read"),
            Err(_) => self.shared.health.distrust(&format!("{doing} panicked")),
        }
        None
    }
}

/// Whether it is time to look at the clock and at whether to stop.
fn is_look(progress: AuditProgress) -> bool {
    progress.done.is_multiple_of(STRIDE)
}

//! What the opening of a ledger is doing, for the operator who waits for it.

use cresset_ledger::audit::AuditProgress;
use cresset_ledger::{StateError, StateResult};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The steps of opening a ledger, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum OpenStep {
    #[default]
    Pages,
    Audit,
    Recovery,
}

/// How far the opening of a ledger is. It can be told to stop.
#[derive(Debug, Default)]
pub struct OpenProgress {
    step: Mutex<OpenStep>,
    /// Percent of the audit's rows that were read.
    percent: AtomicU64,
    stopped: AtomicBool,
    /// Why the database cannot be reached, while it is waited for.
    waiting: Mutex<Option<String>>,
}

impl OpenProgress {
    pub(super) fn enter(&self, step: OpenStep) {
        *self.step.lock() = step;
        self.wait_for_database(None);
    }

    /// Tells why the database cannot be reached, until it can. False once the opening is to stop.
    pub(super) fn wait_for_database(&self, why: Option<String>) -> bool {
        *self.waiting.lock() = why;
        !self.stopped.load(Ordering::Relaxed)
    }

    /// Notes how far the audit is; an error once it is to stop.
    pub(super) fn note(&self, audit: AuditProgress) -> StateResult {
        let percent = audit.done.min(audit.total) * 100 / audit.total.max(1);
        self.percent.store(percent, Ordering::Relaxed);
        if self.stopped.load(Ordering::Relaxed) {
            return Err(StateError::Io("its opening was stopped".into()));
        }
        Ok(())
    }

    /// Ends the audit at its next row, and with it the opening.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// The present step in words.
    pub fn step(&self) -> String {
        if let Some(why) = &*self.waiting.lock() {
            return format!("waiting for the database of the ledger (ledger.url): {why}");
        }
        match *self.step.lock() {
            OpenStep::Pages => "checking the pages of the ledger".into(),
            OpenStep::Audit => {
                format!("auditing the ledger, {} %", self.percent.load(Ordering::Relaxed))
            }
            OpenStep::Recovery => "ending the requests of earlier starts".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_is_told_and_a_stop_ends_the_audit() {
        let progress = OpenProgress::default();
        assert_eq!(progress.step(), "checking the pages of the ledger");
        progress.enter(OpenStep::Audit);
        for (done, total, percent) in [(0, 0, 0), (1, 8, 12), (8, 8, 100), (12, 8, 100)] {
            progress.note(AuditProgress { done, total }).unwrap();
            assert_eq!(progress.step(), format!("auditing the ledger, {percent} %"));
        }
        progress.stop();
        assert!(progress.note(AuditProgress::default()).is_err());
        progress.enter(OpenStep::Recovery);
        assert_eq!(progress.step(), "ending the requests of earlier starts");
    }
}

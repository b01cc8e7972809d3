//! State that the handles, the writer and the auditor have in common: the backend as they read it,
//! the queue, and whether the ledger can be reached and trusted.

use super::backend::LedgerReader;
use super::queue::Queue;
use super::{AuditReport, StoreResult, stats};
use crate::clock::{Clock, UnixMillis};
use crate::failpoint::failpoint;
use crate::ids::BootId;
use crate::ledger::audit::{self, AuditPace, AuditSource, JournalHeads};
use crate::ledger::commands::ReleaseCause;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

const SPACE_LOW: &str = "less space is free where the data folder is than requests.min_free_mib, \
                         and new requests are refused: make room";
const MOVED: &str = "the files of the data folder were removed or replaced while the node runs, and \
                     what it writes would be lost: stop it, put the folder in order, start it again";

pub(super) struct StoreShared {
    pub reader: Arc<dyn LedgerReader>,
    pub clock: Arc<dyn Clock>,
    pub boot: BootId,
    pub queue: Queue,
    pub health: Health,
    /// Releases since the start of the node, by cause.
    pub releases: Mutex<BTreeMap<&'static str, u64>>,
    min_free_bytes: u64,
    /// The latest time stored when the ledger was opened, milliseconds since 1970.
    floor: AtomicU64,
    /// The heads up to which the journal was found sound; `None` before the first audit.
    audited: Mutex<Option<JournalHeads>>,
}

impl StoreShared {
    pub(super) fn new(
        reader: Arc<dyn LedgerReader>,
        clock: Arc<dyn Clock>,
        min_free_bytes: u64,
    ) -> Self {
        Self {
            reader,
            clock,
            boot: BootId::generate(),
            queue: Queue::default(),
            health: Health::default(),
            releases: Mutex::default(),
            min_free_bytes,
            floor: AtomicU64::new(0),
            audited: Mutex::default(),
        }
    }

    /// The later of the clock and the latest time stored: the time that the next command gets.
    pub(super) fn now(&self) -> UnixMillis {
        self.clock.now().max(UnixMillis(self.floor.load(Ordering::Relaxed)))
    }

    pub(super) fn set_floor(&self, stored: UnixMillis) {
        self.floor.store(stored.0, Ordering::Relaxed);
    }

    /// Why new requests are refused now although the ledger works. Free space that cannot be
    /// measured counts as enough.
    pub(super) fn admits_nothing_because(&self) -> Option<&'static str> {
        if !self.reader.is_in_place() {
            return Some(MOVED);
        }
        let low = self.reader.free_bytes().is_some_and(|free| free < self.min_free_bytes);
        low.then_some(SPACE_LOW)
    }

    /// Checks everything stored; a violation stops admissions.
    pub(super) fn audit(&self, pace: AuditPace<'_>) -> StoreResult<AuditReport> {
        Ok(self.note(audit::everything(&*self.reader.audit_source()?, pace)?))
    }

    /// Checks what was written after the last audit that found nothing wrong, and everything when
    /// there was none.
    pub(super) fn audit_news(&self, source: &dyn AuditSource) -> StoreResult<AuditReport> {
        let audited = self.audited.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(self.note(match audited {
            Some(heads) => audit::since(source, heads, &audit::unpaced)?,
            None => audit::everything(source, &audit::unpaced)?,
        }))
    }

    /// Records the findings of an audit.
    fn note(&self, report: AuditReport) -> AuditReport {
        report.violations.iter().for_each(|violation| self.health.distrust(violation));
        if report.ok {
            *self.audited.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(report.heads.clone());
        }
        report
    }

    pub(super) fn released(&self, cause: ReleaseCause, count: u64) {
        let mut releases = self.releases.lock().unwrap_or_else(PoisonError::into_inner);
        *releases.entry(stats::label(cause)).or_default() += count;
    }
}

#[derive(Default)]
pub(super) struct Health {
    /// True after a failure of the storage, until it was reopened.
    disconnected: AtomicBool,
    /// The first violation found. It is never cleared, because a person has to look into it.
    distrusted: OnceLock<String>,
    violations: AtomicU64,
}

impl Health {
    /// False after a failure of the storage, until it was reopened.
    pub(super) fn reachable(&self) -> bool {
        !self.disconnected.load(Ordering::Acquire)
    }

    pub(super) fn set_reachable(&self) {
        self.disconnected.store(false, Ordering::Release);
    }

    /// Stops writing: after a failure the backend must not be written to. It still serves reads
    /// until it is reopened.
    pub(super) fn disconnect(&self, why: &str) {
        tracing::error!(why, "the ledger's storage failed");
        self.disconnected.store(true, Ordering::Release);
    }

    /// Fails with the reason if a rule of the ledger was found broken.
    pub(super) fn trusted(&self) -> Result<(), String> {
        failpoint!("store::distrusted", |_| Err("a rule is broken".into()));
        match self.distrusted.get() {
            None => Ok(()),
            Some(why) => Err(format!("it failed its own checks: {why}")),
        }
    }

    /// Violations found since the start of the node.
    pub(super) fn violations(&self) -> u64 {
        self.violations.load(Ordering::Relaxed)
    }

    pub(super) fn distrust(&self, why: &str) {
        tracing::error!(why, "the ledger breaks its own rules: nothing new is admitted");
        self.violations.fetch_add(1, Ordering::Relaxed);
        self.distrusted.get_or_init(|| why.to_owned());
    }
}

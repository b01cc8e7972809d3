//! What the handles and the writer have in common: the open files, the queue and whether the ledger
//! can be trusted.

use super::embedded::disk::Disk;
use super::embedded::files::Files;
use super::embedded::snapshot::Snapshot;
use super::queue::Queue;
use super::{AuditReport, StoreError, StoreResult, stats};
use crate::clock::Clock;
use crate::failpoint::failpoint;
use crate::ids::BootId;
use crate::ledger::audit;
use crate::ledger::commands::ReleaseCause;
use crate::ledger::state::JournalHead;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard};

pub(super) struct StoreShared {
    pub disk: Box<dyn Disk>,
    pub clock: Arc<dyn Clock>,
    pub boot: BootId,
    pub queue: Queue,
    pub health: Health,
    /// Releases since the start of the node, by cause.
    pub releases: Mutex<BTreeMap<&'static str, u64>>,
    /// `None` while a failed storage is being reopened.
    files: RwLock<Option<Files>>,
    min_free_bytes: u64,
    /// Up to where the journal was found sound; `None` before the first audit.
    audited: Mutex<Option<JournalHead>>,
}

impl StoreShared {
    pub fn new(
        disk: Box<dyn Disk>,
        clock: Arc<dyn Clock>,
        files: Files,
        min_free_bytes: u64,
    ) -> Self {
        Self {
            disk,
            clock,
            boot: BootId::generate(),
            queue: Queue::default(),
            health: Health::default(),
            releases: Mutex::default(),
            files: RwLock::new(Some(files)),
            min_free_bytes,
            audited: Mutex::default(),
        }
    }

    /// Where free space cannot be told, there is enough.
    pub fn is_space_low(&self) -> bool {
        self.disk.free_bytes().is_ok_and(|free| free < self.min_free_bytes)
    }

    pub fn files(&self) -> RwLockReadGuard<'_, Option<Files>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `read` on the open files.
    pub fn with_files<T>(&self, read: impl FnOnce(&Files) -> StoreResult<T>) -> StoreResult<T> {
        match &*self.files() {
            Some(files) => read(files),
            None => Err(StoreError::Unavailable("its storage failed and is being reopened".into())),
        }
    }

    pub fn snapshot(&self) -> StoreResult<Snapshot> {
        self.with_files(|files| Ok(files.snapshot()?))
    }

    /// Checks everything stored; a violation stops admissions.
    pub fn audit(&self) -> StoreResult<AuditReport> {
        Ok(self.judge(audit::everything(&self.snapshot()?)?))
    }

    /// Checks what was written after the last audit that found nothing wrong, and everything when
    /// there was none.
    pub fn audit_news(&self, snapshot: &Snapshot) -> StoreResult<AuditReport> {
        let audited = *self.audited.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(self.judge(match audited {
            Some(head) => audit::since(snapshot, head)?,
            None => audit::everything(snapshot)?,
        }))
    }

    fn judge(&self, report: AuditReport) -> AuditReport {
        report.violations.iter().for_each(|violation| self.health.distrust(violation));
        if report.ok {
            *self.audited.lock().unwrap_or_else(PoisonError::into_inner) = Some(report.head);
        }
        report
    }

    pub fn released(&self, cause: ReleaseCause, count: u64) {
        let mut releases = self.releases.lock().unwrap_or_else(PoisonError::into_inner);
        *releases.entry(stats::label(cause)).or_default() += count;
    }

    /// Stops writing: after a failure the handles must not be asked again. They still serve reads
    /// until they are replaced.
    pub fn disconnect(&self, why: &str) {
        tracing::error!(why, "the ledger's storage failed");
        self.health.reachable.store(false, Ordering::Release);
    }

    pub fn connect(&self, files: Files) {
        *self.files.write().unwrap_or_else(PoisonError::into_inner) = Some(files);
        self.health.reachable.store(true, Ordering::Release);
    }

    pub fn take_files(&self) -> Option<Files> {
        let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
        files.take()
    }
}

pub(super) struct Health {
    reachable: AtomicBool,
    /// The first violation found. Never cleared: a person has to look.
    distrusted: OnceLock<String>,
    violations: AtomicU64,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            reachable: AtomicBool::new(true),
            distrusted: OnceLock::new(),
            violations: AtomicU64::new(0),
        }
    }
}

impl Health {
    pub fn reachable(&self) -> bool {
        self.reachable.load(Ordering::Acquire)
    }

    /// The reason when a rule of the ledger was found broken.
    pub fn trusted(&self) -> Result<(), String> {
        failpoint!("store::distrusted", |_| Err("a rule is broken".into()));
        match self.distrusted.get() {
            None => Ok(()),
            Some(why) => Err(format!("it failed its own checks: {why}")),
        }
    }

    /// Violations found since the start of the node.
    pub fn violations(&self) -> u64 {
        self.violations.load(Ordering::Relaxed)
    }

    pub fn distrust(&self, why: &str) {
        tracing::error!(why, "the ledger breaks its own rules: nothing new is admitted");
        self.violations.fetch_add(1, Ordering::Relaxed);
        self.distrusted.get_or_init(|| why.to_owned());
    }
}

//! What the handles and the writer have in common: the open files, the queue and whether the ledger can be trusted.

use super::disk::Disk;
use super::files::Files;
use super::queue::Queue;
use super::snapshot::Snapshot;
use super::{AuditReport, Result, StoreError, check};
use crate::clock::Clock;
use crate::failpoint::failpoint;
use crate::ids::BootId;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard};

pub(super) struct Shared {
    pub disk: Box<dyn Disk>,
    pub clock: Arc<dyn Clock>,
    pub boot: BootId,
    pub queue: Queue,
    pub health: Health,
    /// `None` while a failed storage is being reopened.
    files: RwLock<Option<Files>>,
}

impl Shared {
    pub fn new(disk: Box<dyn Disk>, clock: Arc<dyn Clock>, files: Files) -> Self {
        Self {
            disk,
            clock,
            boot: BootId::generate(),
            queue: Queue::default(),
            health: Health::default(),
            files: RwLock::new(Some(files)),
        }
    }

    pub fn files(&self) -> RwLockReadGuard<'_, Option<Files>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `read` on the open files.
    pub fn with_files<T>(&self, read: impl FnOnce(&Files) -> Result<T>) -> Result<T> {
        match &*self.files() {
            Some(files) => read(files),
            None => Err(StoreError::Unavailable("its storage failed and is being reopened".into())),
        }
    }

    pub fn snapshot(&self) -> Result<Snapshot> {
        failpoint!("store::read", |_| Err(StoreError::Unavailable("a read failed".into())));
        self.with_files(|files| Ok(files.snapshot()?))
    }

    /// Checks everything stored; a violation stops admissions.
    pub fn audit(&self) -> Result<AuditReport> {
        let report = check::audit(&self.snapshot()?)?;
        if let Some(violation) = report.violations.first() {
            self.health.distrust(violation);
        }
        Ok(report)
    }

    /// Stops writing: after a failure the handles must not be asked again. They still serve reads until they are
    /// replaced.
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
}

impl Default for Health {
    fn default() -> Self {
        Self { reachable: AtomicBool::new(true), distrusted: OnceLock::new() }
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

    pub fn distrust(&self, why: &str) {
        tracing::error!(why, "the ledger breaks its own rules: nothing new is admitted");
        self.distrusted.get_or_init(|| why.to_owned());
    }
}

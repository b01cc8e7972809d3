//! The embedded backend: two redb files in one folder of this machine, `ledger.redb` and
//! `bodies.redb`. Nothing outside this folder uses redb. `DESIGN.md` in `src/store` draws the
//! files.

mod audit_source;
mod backup;
mod backup_seal;
mod bodies;
mod carry;
mod disk;
mod files;
mod journal_view;
mod metered;
mod moving;
mod node_files;
mod retention;
mod rows;
mod schema;
mod segment_shelf;
mod segments;
mod set_aside;
mod snapshot;
mod state;
mod tables;
#[cfg(test)]
mod tests;

use super::backend::{Backend, BatchFailure, LedgerReader, ReadFuture, Seal, Snapshot};
use super::limits::Limits;
use super::queue::WriteAction;
use super::scope::BackupScope;
use super::{AuditReport, StoreResult, StoredBody};
use crate::settings::LedgerSettings;
pub(super) use backup::{init, restore};
use cresset_base::{AccountId, BootId, DiskReserve, RequestId, UnixMillis, failpoint};
use cresset_ledger::audit::{self, AuditPace, AuditSource, JournalChain};
use cresset_ledger::{Account, Credential, RequestKey, StateError, StateResult};
pub(super) use disk::Disk;
pub(super) use disk::lock_file;
use disk::{File, LockedFolder};
use files::{Files, PageCheck};
use metered::MeteredFolder;
pub use metered::SyncMeter;
pub(super) use moving::{check_free_names, last_boot, put_away, read_whole};
use parking_lot::RwLock;
use redb::ReadableDatabase;
use rows::SealedPosition;
use snapshot::{EmbeddedSnapshot, ready};
use state::WriteState;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tables::OrFault;

/// Free bytes under which a failed ledger is not reopened yet. Opening writes to both files, and an
/// opening that fails halfway takes the old handle's reads away: 16 MiB are room for that and for
/// the pending ends of attempts.
const MIN_REOPEN_BYTES: u64 = 16 << 20;

/// The place of an embedded ledger.
#[derive(Clone, Debug)]
pub struct EmbeddedConfig {
    /// The folder of both files.
    pub dir: PathBuf,
    pub settings: LedgerSettings,
    /// Records the time of each sync; for measurements.
    pub meter: Option<Arc<SyncMeter>>,
}

impl EmbeddedConfig {
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), settings: LedgerSettings::default(), meter: None }
    }
}

pub(super) struct EmbeddedBackend {
    disk: Arc<dyn Disk>,
    /// `None` while a failed storage is being reopened.
    files: RwLock<Option<Files>>,
}

impl EmbeddedBackend {
    /// Opens both files, after checking the pages of `ledger.redb`, and of `bodies.redb` where the
    /// damage of them may be what ended the last processes.
    pub(super) fn open_on(disk: Arc<dyn Disk>) -> StoreResult<Self> {
        let files = Files::open(&disk, PageCheck::LedgerUnlessDoubted)?;
        Ok(Self { disk, files: RwLock::new(Some(files)) })
    }

    fn replace_files(&self, files: Option<Files>) -> Option<Files> {
        std::mem::replace(&mut *self.files.write(), files)
    }

    fn with_files<T>(&self, read: impl FnOnce(&Files) -> StateResult<T>) -> StateResult<T> {
        match &*self.files.read() {
            Some(files) => read(files),
            None => Err(StateError::Io("it is being reopened".into())),
        }
    }

    fn view(&self) -> StateResult<EmbeddedSnapshot> {
        self.with_files(Files::snapshot)
    }
}

impl LedgerReader for EmbeddedBackend {
    fn snapshot(&self) -> ReadFuture<'_, Box<dyn Snapshot>> {
        ready(|| self.view().map(|view| Box::new(view) as Box<dyn Snapshot>))
    }

    fn credential_and_account(
        &self,
        digest: &[u8; 32],
    ) -> ReadFuture<'_, Option<(Credential, Account)>> {
        ready(|| self.view()?.credential_and_account(digest))
    }

    fn body(&self, key: &RequestKey, now: UnixMillis) -> ReadFuture<'_, Option<StoredBody>> {
        ready(|| self.with_files(|files| bodies::read(files, key, now)))
    }

    fn audit_source(&self) -> StoreResult<Box<dyn AuditSource + '_>> {
        Ok(Box::new(self.view()?))
    }

    fn close_journal_part(&self, pace: AuditPace<'_>) -> StoreResult<bool> {
        let shelf = self.with_files(|files| Ok(Arc::clone(&files.segments)))?;
        shelf.close_one(&|| self.view(), pace)
    }

    fn backup(&self, scope: &BackupScope, to: &Path, keep_free: u64) -> StoreResult {
        if let Some(folder) = self.disk.folder() {
            let wanted = self.disk.file_bytes().values().sum();
            let reserve = DiskReserve::new(folder, keep_free);
            reserve
                .check(to, wanted)
                .map_err(|why| crate::StoreError::Unusable(why.to_string()))?;
        }
        backup::write(&self.view()?, scope, to)
    }

    fn erase_answers(&self, account: AccountId, request: Option<RequestId>) -> StoreResult<u64> {
        Ok(self.with_files(|files| bodies::erase(&files.bodies, account, request))?)
    }

    fn free_bytes(&self) -> Option<u64> {
        self.disk.free_bytes().ok()
    }

    fn file_bytes(&self) -> BTreeMap<&'static str, u64> {
        self.disk.file_bytes()
    }

    fn is_in_place(&self) -> bool {
        self.disk.is_in_place()
    }
}

impl Backend for EmbeddedBackend {
    const IS_SHARED: bool = false;
    type Txn<'t> = WriteState<'t>;

    fn was_left_open(&self) -> StateResult<bool> {
        self.with_files(Files::was_left_open)
    }

    fn seal(&self) -> StateResult<Option<Seal>> {
        let sealed = self.with_files(Files::seal)?;
        Ok(sealed.map(|SealedPosition { head, fully_audited_at }| Seal {
            heads: head.into(),
            fully_audited_at,
        }))
    }

    fn set_seal(&self, seal: Option<&Seal>) -> StateResult {
        let position = seal.map(|seal| SealedPosition {
            head: seal.heads.of(JournalChain::Shared),
            fully_audited_at: seal.fully_audited_at,
        });
        self.with_files(|files| files.set_seal(position))
    }

    fn stored_time(&self) -> StateResult<UnixMillis> {
        self.with_files(Files::stored_time)
    }

    fn set_time(&self, now: UnixMillis) -> StateResult {
        self.with_files(|files| files.set_time(now))
    }

    fn claim(&self, boot: BootId) -> StoreResult {
        let claimed = self.with_files(|files| {
            files.set_in_use(boot)?;
            failpoint!("store::claimed");
            bodies::remove_orphans(files)
        });
        Ok(claimed?)
    }

    fn transact<T>(
        &self,
        _: usize,
        actions: &[&WriteAction],
        now: UnixMillis,
        mut run: impl FnMut(&mut WriteState<'_>) -> Result<T, BatchFailure>,
    ) -> Result<T, BatchFailure> {
        let Some(files) = &*self.files.read() else {
            return Err(BatchFailure::InDoubt("it is not open".into()));
        };
        bodies::write_all(files, actions)?;
        let archive = tables::open(&files.bodies.begin_read().or_fault()?, tables::ARCHIVE)?;
        let txn = files.ledger.begin_write().or_fault()?;
        let mut state = WriteState::open(&txn, archive, now)?;
        let result = run(&mut state)?;
        if state.finish()? {
            failpoint!("store::before_commit");
            failpoint!("store::commit_lost", |_| Err(BatchFailure::InDoubt(
                "the commit failed".into()
            )));
            txn.commit().or_fault()?;
            failpoint!("store::after_commit");
            failpoint!("store::commit_unknown", |_| Err(BatchFailure::InDoubt(
                "the commit failed".into()
            )));
        }
        Ok(result)
    }

    fn sweep(&self, now: UnixMillis, limits: &Limits) -> StateResult<bool> {
        match &*self.files.read() {
            Some(files) => {
                let more = segments::sweep(files)?;
                Ok(retention::sweep(files, now, limits)? || more)
            }
            None => Ok(false),
        }
    }

    /// On a full disk the old handle still serves reads; a new one could not be made.
    fn can_reopen(&self) -> bool {
        self.free_bytes().is_some_and(|free| free >= MIN_REOPEN_BYTES)
    }

    fn reopen(&self, check: impl FnOnce(&dyn AuditSource) -> StoreResult) -> StoreResult {
        // No second handle can be opened beside the first.
        drop(self.replace_files(None));
        failpoint!("store::reopen", |_| Err(super::StoreError::Unavailable(
            "it stays closed".into()
        )));
        let files = Files::open(&self.disk, PageCheck::Everything)?;
        check(&files.snapshot()?)?;
        self.replace_files(Some(files));
        Ok(())
    }

    fn close(&self, boot: BootId, clean: bool) -> StateResult {
        match self.replace_files(None).filter(|_| clean) {
            Some(files) => files.close(boot),
            None => Ok(()),
        }
    }
}

/// Takes the folder for this process.
pub(super) fn lock(config: &EmbeddedConfig) -> StoreResult<Arc<dyn Disk>> {
    let mut folder = LockedFolder::lock(&config.dir)?;
    folder.settings = config.settings.clone();
    Ok(match &config.meter {
        None => Arc::new(folder),
        Some(meter) => Arc::new(MeteredFolder { folder, meter: Arc::clone(meter) }),
    })
}

/// Whether the folder has a ledger.
pub(super) fn exists(config: &EmbeddedConfig) -> bool {
    config.dir.join(File::Ledger.name()).exists()
}

fn open_folder(config: &EmbeddedConfig, pages: PageCheck) -> StoreResult<Files> {
    let folder: Arc<dyn Disk> = Arc::new(LockedFolder::lock(&config.dir)?);
    Files::open(&folder, pages)
}

/// The latest time stored in a ledger that no process has open.
pub(super) fn stored_time(config: &EmbeddedConfig) -> StoreResult<UnixMillis> {
    let files = open_folder(config, PageCheck::LedgerUnlessDoubted)?;
    Ok(files.stored_time()?)
}

/// Audits a ledger that no process has open.
pub(super) fn inspect(config: &EmbeddedConfig) -> StoreResult<AuditReport> {
    let files = open_folder(config, PageCheck::Everything)?;
    Ok(audit::everything(&files.snapshot()?, &audit::unpaced)?)
}

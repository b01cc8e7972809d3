//! The place of a ledger in a database, which the crate of a backend supplies.

use super::backend::{Backend, MoveSource};
use super::{
    AuditPolicy, AuditReport, Limits, OpenProgress, Store, StoreConfig, StoreError, StoreResult,
};
use cresset_base::{BootId, Clock, UnixMillis};
use cresset_ledger::audit::AuditProgress;
use std::any::Any;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Between two tries to reach a database at the start of a node.
const BETWEEN_TRIES: Duration = Duration::from_secs(1);

/// The place of a ledger in a database. All methods but `folder` and `own_tools` block.
pub trait DatabasePlace: Debug + Send + Sync {
    /// The data folder that a node locks while it uses the ledger.
    fn folder(&self) -> Option<&Path>;

    /// Makes an empty ledger; refuses where there is one.
    fn init(&self) -> StoreResult;

    /// Makes an empty ledger for a measurement beside whatever the database has, without a data
    /// folder, and removes it when the second value is dropped.
    fn init_scratch(&self) -> StoreResult<(StoreConfig, Box<dyn Any + Send>)>;

    /// Opens the backend and starts the store on it.
    fn open(&self, opening: StoreOpening<'_>) -> StoreResult<Store>;

    /// The latest time stored.
    fn stored_time(&self) -> StoreResult<UnixMillis>;

    /// Audits a ledger, whoever uses it, and changes no record.
    fn inspect(&self) -> StoreResult<AuditReport>;

    /// Why this program makes and restores no backup there.
    fn own_tools(&self) -> StoreError;

    /// The process that had used the ledger last that was moved here; `None` where none was.
    fn moved_from(&self) -> StoreResult<Option<BootId>>;

    /// Takes over everything that a ledger holds, where an audit read `audited`, in one transaction
    /// that is audited itself. Refuses where there is a ledger.
    fn take_over(
        &self,
        from: (&dyn MoveSource, &AuditReport),
        now: UnixMillis,
        hooks: &MoveHooks<'_>,
    ) -> StoreResult<MoveReport>;
}

/// What a move tells the command that asked for it, and what it lets it do.
pub struct MoveHooks<'a> {
    /// Hears the step in words, and how many of its rows are done.
    pub progress: &'a dyn Fn(&'static str, AuditProgress),
    /// Makes the configuration name the database. It runs before the commit.
    pub configure: &'a dyn Fn() -> StoreResult,
}

/// What a move did.
#[derive(Debug, Default)]
pub struct MoveReport {
    /// What the audit in the database read; `None` where an earlier run had moved everything and
    /// this one only put the files away.
    pub rows: Option<AuditReport>,
    /// Stored answers that were moved.
    pub answers: u64,
    /// The names under which the files of the folder are kept.
    pub files: Vec<PathBuf>,
}

/// How the store is to be started on a backend.
#[derive(Clone)]
pub struct StoreOpening<'o> {
    /// This machine's clock.
    pub clock: Arc<dyn Clock>,
    pub(super) limits: Limits,
    pub(super) policy: AuditPolicy,
    pub(super) progress: &'o OpenProgress,
}

impl StoreOpening<'_> {
    /// Whether a node opens the ledger, and no short command.
    pub fn is_for_node(&self) -> bool {
        self.policy == AuditPolicy::Always
    }

    /// Starts the store on a backend, whose ledger goes by `clock`.
    pub fn start(self, backend: &Arc<impl Backend>, clock: Arc<dyn Clock>) -> StoreResult<Store> {
        Store::start(backend, clock, self.limits, self.policy, self.progress)
    }
}

/// Opens the ledger. A node tries again as long as the database cannot be reached.
pub(super) fn open(place: &dyn DatabasePlace, opening: &StoreOpening<'_>) -> StoreResult<Store> {
    loop {
        match place.open(opening.clone()) {
            Err(StoreError::Unavailable(why)) if opening.is_for_node() => {
                tracing::warn!(
                    why,
                    "the database of the ledger cannot be reached, which is tried again"
                );
                if !opening.progress.wait_for_database(Some(why.clone())) {
                    return Err(StoreError::Unavailable(why));
                }
                thread::sleep(BETWEEN_TRIES);
            }
            other => return other,
        }
    }
}

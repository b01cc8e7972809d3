//! The ledger on disk: redb only, one writer thread, group commit. Nothing else in the node knows
//! redb.
//!
//! What is checked when: opening checks every page of both files, always. A node then audits
//! everything before it listens; a short command does so only when the last stop was not orderly.
//! While a node runs, what is new is audited every minute and everything every day. After a failure
//! of the storage the reopened files are checked page by page and what is new is audited. A backup
//! is audited before it gets its name, and again before a restore replaces anything.

mod auditor;
mod embedded;
mod limits;
mod queue;
mod shared;
mod stats;
mod writer;

use crate::clock::{Clock, UnixMillis};
use crate::failpoint::failpoint;
use crate::ids::{AttemptId, BootId};
use crate::ledger::audit;
pub use crate::ledger::audit::AuditReport;
use crate::ledger::state::StateError;
use crate::ledger::{Command, Outcome, Refusal, RequestKey};
use auditor::Auditor;
use embedded::disk::{Disk, LockedFolder};
use embedded::files::Files;
use embedded::metered::MeteredFolder;
pub use embedded::metered::SyncMeter;
use embedded::rows::StoredBody;
pub use embedded::snapshot::Snapshot;
use embedded::{backup, bodies};
pub use limits::Limits;
use queue::{Queue, WriteAction, WriteJob};
use shared::StoreShared;
pub use stats::StoreStats;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use tokio::sync::oneshot;
use writer::Writer;

#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The command was understood and refused; nothing was written.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Whether the command is durable is not known, or the store cannot be used now. The same
    /// command may be sent again.
    #[error("the ledger cannot be reached: {0}")]
    Unavailable(String),
    /// Nothing was written: more commands wait than the ledger can take soon.
    #[error(
        "{} commands wait for the ledger already: send it again in a moment",
        queue::MAX_WAITING
    )]
    Overloaded,
    /// The folder has no ledger, or one that must not be used; the text says what to do.
    #[error("{0}")]
    Unusable(String),
    /// Another process has the folder open; the text names it.
    #[error("{0}")]
    InUse(String),
}

impl From<StateError> for StoreError {
    fn from(error: StateError) -> Self {
        Self::Unavailable(error.to_string())
    }
}

/// The result of using the store.
pub type StoreResult<T = ()> = Result<T, StoreError>;

/// Handle to the store; cheap to clone. Dropping the last one waits for what is queued and closes
/// the files cleanly.
#[derive(Clone)]
pub struct Store {
    inner: Arc<StoreInner>,
}

struct StoreInner {
    shared: Arc<StoreShared>,
    writer: Option<JoinHandle<()>>,
    /// Dropped last: closing the files ends an audit that is under way.
    _auditor: Option<Auditor>,
}

impl Drop for StoreInner {
    fn drop(&mut self) {
        self.shared.queue.close();
        // A writer that panics takes the process with it.
        let _ = self.writer.take().map(JoinHandle::join);
    }
}

impl Store {
    /// Creates the ledger in an existing folder; refuses when there is one.
    pub fn init(dir: &Path) -> StoreResult {
        backup::init(dir)
    }

    /// Whether the folder holds a ledger.
    pub fn exists(dir: &Path) -> bool {
        dir.join(disk::File::Ledger.name()).exists()
    }

    /// Locks the folder, opens, checks every page and every invariant, releases the reservations of
    /// earlier boots, starts the writer and the background audit. A second process on the same
    /// folder gets `InUse`.
    pub fn open(dir: &Path, clock: Arc<dyn Clock>) -> StoreResult<Self> {
        Self::open_with(dir, clock, Limits::default())
    }

    /// `open` with other limits.
    pub fn open_with(dir: &Path, clock: Arc<dyn Clock>, limits: Limits) -> StoreResult<Self> {
        Self::start(Box::new(LockedFolder::lock(dir)?), clock, limits)
    }

    /// `open_with` for a short command: checks every page, but audits only when the last stop was
    /// not orderly, and has no background audit.
    pub fn open_briefly(dir: &Path, clock: Arc<dyn Clock>, limits: Limits) -> StoreResult<Self> {
        let (shared, writer) =
            prepare(Box::new(LockedFolder::lock(dir)?), clock, limits, AuditPolicy::AfterCrash)?;
        Self::run(shared, writer, None)
    }

    /// `open` for measurements: `meter` learns what every sync costs.
    pub fn open_metered(
        dir: &Path,
        clock: Arc<dyn Clock>,
        meter: Arc<SyncMeter>,
    ) -> StoreResult<Self> {
        let folder = LockedFolder::lock(dir)?;
        Self::start(Box::new(MeteredFolder { folder, meter }), clock, Limits::default())
    }

    fn start(disk: Box<dyn Disk>, clock: Arc<dyn Clock>, limits: Limits) -> StoreResult<Self> {
        let (shared, writer) = prepare(disk, clock, limits, AuditPolicy::Always)?;
        let auditor = Auditor::start(Arc::clone(&shared)).map_err(unstarted)?;
        Self::run(shared, writer, Some(auditor))
    }

    fn run(
        shared: Arc<StoreShared>,
        writer: Writer,
        auditor: Option<Auditor>,
    ) -> StoreResult<Self> {
        let thread = thread::Builder::new().name("store-writer".into());
        // Without its writer a node could end nothing any more: a crash and the recovery after it
        // can.
        let run = || {
            panic::catch_unwind(AssertUnwindSafe(|| writer.run()))
                .unwrap_or_else(|_| std::process::abort());
        };
        let writer = thread.spawn(run).map_err(unstarted)?;
        Ok(Self { inner: Arc::new(StoreInner { shared, writer: Some(writer), _auditor: auditor }) })
    }

    /// This start of the node; every reservation it makes carries it.
    pub fn boot(&self) -> BootId {
        self.inner.shared.boot
    }

    /// Applies one command durably: returns after the commit. An admission whose caller stops
    /// waiting, or is told `Unavailable`, is released; any other command may be sent again until
    /// its outcome is known.
    pub async fn submit(&self, command: Command) -> StoreResult<Outcome> {
        let action = WriteAction::Apply(command);
        let guard = AdmissionGuard::of(&action, &self.inner.shared.queue);
        let outcome = self.enqueue(action).await;
        guard.disarm();
        outcome.unwrap_or_else(|_| Err(gone()))
    }

    /// The same from a thread outside the runtime.
    pub fn submit_blocking(&self, command: Command) -> StoreResult<Outcome> {
        let waiting = self.enqueue(WriteAction::Apply(command));
        waiting.blocking_recv().unwrap_or_else(|_| Err(gone()))
    }

    /// Sends a command without waiting. A start, settlement or release is never lost while the
    /// process lives: it outlasts a failure of the storage, and their number is bounded by that of
    /// open reservations.
    pub fn submit_detached(&self, command: Command) {
        let job = WriteJob::new(WriteAction::Apply(command), None);
        self.inner.shared.queue.push(job);
    }

    /// A consistent snapshot for reads.
    pub fn read(&self) -> StoreResult<Snapshot> {
        failpoint!("store::read", |_| Err(StoreError::Unavailable("a read failed".into())));
        self.inner.shared.snapshot()
    }

    /// The same for answers that depend on balances or permissions: refused once a rule of the
    /// ledger was found broken.
    pub fn read_trusted(&self) -> StoreResult<Snapshot> {
        self.inner.shared.health.trusted().map_err(StoreError::Unavailable)?;
        self.read()
    }

    /// Durable before it returns. The body can be read until `expires_at`.
    pub async fn put_body(
        &self,
        key: RequestKey,
        body: bytes::Bytes,
        expires_at: UnixMillis,
    ) -> StoreResult {
        let content = body;
        let body = StoredBody { expires_at, content };
        let stored = self.enqueue(WriteAction::PutBody { key, body }).await;
        stored.unwrap_or_else(|_| Err(gone())).map(|_| ())
    }

    /// `None` when there is none or it has expired.
    pub fn body(&self, key: &RequestKey) -> StoreResult<Option<bytes::Bytes>> {
        let shared = &self.inner.shared;
        let now = shared.clock.now();
        shared.with_files(|files| Ok(bodies::read(files, key, now)?))
    }

    /// Checks every invariant over everything stored. A violation stops admissions until a person
    /// has looked.
    pub fn audit(&self) -> StoreResult<AuditReport> {
        self.inner.shared.audit()
    }

    /// The same over a folder that nobody has open, also where `open` refuses it for what it finds.
    /// Changes no record.
    pub fn inspect(dir: &Path) -> StoreResult<AuditReport> {
        let files = Files::open(&LockedFolder::lock(dir)?)?;
        Ok(audit::everything(&files.snapshot()?)?)
    }

    /// Copies a consistent snapshot into a new file, verifies it, renames it into place.
    pub fn backup(&self, to: &Path) -> StoreResult {
        backup::write(&self.read()?, to)
    }

    /// Replaces a (closed) folder's ledger with a backup, after checking the backup.
    pub fn restore(dir: &Path, from: &Path) -> StoreResult {
        backup::restore(dir, from)
    }

    /// True while commits succeed and no audit has failed.
    pub fn healthy(&self) -> bool {
        let health = &self.inner.shared.health;
        health.reachable() && health.trusted().is_ok()
    }

    /// True while new requests are refused for want of disk space.
    pub fn is_space_low(&self) -> bool {
        self.inner.shared.is_space_low()
    }

    fn enqueue(&self, action: WriteAction) -> oneshot::Receiver<StoreResult<Outcome>> {
        let (reply, waiting) = oneshot::channel();
        self.inner.shared.queue.push(WriteJob::new(action, Some(reply)));
        waiting
    }
}

/// When opening audits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AuditPolicy {
    Always,
    AfterCrash,
}

/// Opens, checks and recovers: everything before the first new command.
fn prepare(
    disk: Box<dyn Disk>,
    clock: Arc<dyn Clock>,
    limits: Limits,
    audit_policy: AuditPolicy,
) -> StoreResult<(Arc<StoreShared>, Writer)> {
    let files = Files::open(&*disk)?;
    let crashed = files.clean_marker()?.is_some_and(|last| !last.clean);
    let now = files.clock()?;
    let shared = Arc::new(StoreShared::new(disk, clock, files, limits.min_free_bytes));
    failpoint!("store::opened");
    if (crashed || audit_policy == AuditPolicy::Always)
        && let Some(violation) = shared.audit()?.violations.first()
    {
        return Err(StoreError::Unusable(format!(
            "the ledger breaks its own rules and is not served: {violation}; `cresset ledger audit` names every \
             violation, `cresset ledger restore` puts a backup in its place"
        )));
    }
    if crashed {
        tracing::warn!("the last stop was not orderly: the ledger was checked and is intact");
    }
    shared.with_files(|files| Ok(files.set_clean_marker(shared.boot, false)?))?;
    failpoint!("store::claimed");
    let mut writer = Writer::new(Arc::clone(&shared), limits, now);
    writer.recover()?;
    Ok((shared, writer))
}

#[expect(clippy::needless_pass_by_value, reason = "the shape that map_err asks for")]
fn unstarted(error: std::io::Error) -> StoreError {
    StoreError::Unavailable(format!("a thread cannot be started: {error}"))
}

fn gone() -> StoreError {
    StoreError::Unavailable("its writer stopped".into())
}

/// Releases an admission whose caller is dropped before it heard the outcome.
struct AdmissionGuard<'a> {
    queue: &'a Queue,
    admission: Option<(RequestKey, AttemptId)>,
}

impl<'a> AdmissionGuard<'a> {
    fn of(action: &WriteAction, queue: &'a Queue) -> Self {
        let admission = action.admit_ids();
        Self { queue, admission }
    }

    fn disarm(mut self) {
        self.admission = None;
    }
}

impl Drop for AdmissionGuard<'_> {
    fn drop(&mut self) {
        if let Some((key, attempt)) = self.admission {
            self.queue.push(writer::release_unheard(key, attempt));
        }
    }
}

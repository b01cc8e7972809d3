//! The ledger as the rest of the node uses it: one thread at a time writes an account, group
//! commit, acknowledgement after the commit is durable. A backend keeps the rows; `backend` states
//! what it promises and `DESIGN.md` draws the one in redb.
//!
//! These checks are made. Opening checks every page of the ledger's own file; the rows of the other
//! one are read by the audit of everything, and whoever reads a damaged one before is told. Audits
//! leave a *seal*: the end of the journal up to which they found everything sound. A node verifies
//! the seal before it listens and audits what came after it; a short command does so only when the
//! last stop was not orderly. A ledger without a seal is audited as a whole. While a node runs, new
//! entries are audited every minute, and everything in the background every day and after a stop
//! that was not orderly. After a failure of the storage the reopened files are checked page by page
//! and new entries are audited. A backup is audited and sealed with a digest before it gets its
//! name; a restore checks that seal and the rows again before it replaces anything.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod auditor;
mod backend;
mod clock_check;
mod cluster;
pub mod codec;
mod database;
mod embedded;
mod limits;
mod moving;
mod open_progress;
mod queue;
mod restore;
pub mod rows;
mod scope;
mod settings;
mod shared;
mod stats;
mod stored_body;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod writer;

use auditor::Auditor;
pub use backend::{
    Backend, BatchFailure, LedgerReader, LedgerTxn, MoveSource, OtherNodes, ReadFuture, Seal,
    Snapshot,
};
pub use clock_check::ClockLimits;
pub use cluster::{ListedNode, NodeFacts, ReleasePrices};
use cresset_base::{
    AccountId, AttemptId, BootId, Clock, FileLock, RequestId, UnixMillis, failpoint,
};
pub use cresset_ledger::audit::AuditReport;
use cresset_ledger::{
    Account, Command, Credential, Outcome, Refusal, RequestKey, StateError, audit,
};
pub use database::{DatabasePlace, MoveHooks, MoveReport, StoreOpening};
use embedded::EmbeddedBackend;
pub use embedded::{EmbeddedConfig, SyncMeter};
pub use limits::Limits;
pub use open_progress::OpenProgress;
use open_progress::OpenStep;
pub use queue::WriteAction;
use queue::{Queue, WriteJob};
pub use restore::{LostRows, ReplacedState, RestoreReport};
pub use scope::{BackupScope, NodeFile, RestoreScope};
pub use settings::{ClockSettings, LedgerSettings, RequestSettings};
use shared::StoreShared;
pub use stats::{BudgetNotice, StoreStats};
use std::collections::BTreeMap;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;
pub use stored_body::StoredBody;
use tokio::sync::oneshot;
use uuid::Uuid;
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
    /// Nothing was written, because more commands wait than the ledger can take soon.
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

impl StoreError {
    /// Refuses what was written before schemas began at 1.
    pub fn older_format(what: &str) -> Self {
        Self::Unusable(format!(
            "{what} has a format from before version 0.2.0 and is left as it is: the last commit that reads it is 0b3e359a"
        ))
    }
}

impl From<StateError> for StoreError {
    fn from(error: StateError) -> Self {
        Self::Unavailable(error.to_string())
    }
}

/// The result of using the store.
pub type StoreResult<T = ()> = Result<T, StoreError>;

/// The place where the ledger is kept, which decides its backend.
#[derive(Clone, Debug)]
pub enum StoreConfig {
    Embedded(EmbeddedConfig),
    Database(Arc<dyn DatabasePlace>),
}

impl StoreConfig {
    /// An embedded ledger in this folder.
    pub fn folder(dir: impl Into<PathBuf>) -> Self {
        Self::Embedded(EmbeddedConfig::new(dir))
    }
}

/// Handle to the store; cheap to clone. Dropping the last one waits for what is queued and closes
/// the files cleanly.
#[derive(Clone)]
pub struct Store {
    inner: Arc<StoreInner>,
}

struct StoreInner {
    shared: Arc<StoreShared>,
    writer: Option<JoinHandle<()>>,
    auditor: Option<Auditor>,
    /// The locked data folder of a node whose ledger is elsewhere. It goes last.
    folder: OnceLock<FileLock>,
}

impl Drop for StoreInner {
    fn drop(&mut self) {
        // An audit that is under way ends at once.
        drop(self.auditor.take());
        self.shared.queue.close();
        // The join cannot fail, because a writer that panics ends the process.
        let _ = self.writer.take().map(JoinHandle::join);
    }
}

impl Store {
    /// Creates an empty ledger; refuses where there is one.
    pub fn init(config: &StoreConfig) -> StoreResult {
        match config {
            StoreConfig::Embedded(config) => embedded::init(config),
            StoreConfig::Database(place) => place.init(),
        }
    }

    /// Whether there is a ledger in a folder. It need not be one that can be opened. A database is
    /// asked when its ledger is opened.
    pub fn exists(config: &StoreConfig) -> bool {
        match config {
            StoreConfig::Embedded(config) => embedded::exists(config),
            StoreConfig::Database(_) => true,
        }
    }

    /// Takes the ledger of a folder for this process, which opens it then. A second process gets
    /// `InUse`. With a database, locks only the node's data folder, if it has one.
    pub fn lock(config: &StoreConfig) -> StoreResult<LockedStore> {
        let place = match config {
            StoreConfig::Embedded(config) => LockedPlace::Folder(embedded::lock(config)?),
            StoreConfig::Database(place) => {
                let folder = place.folder().map(embedded::lock_file).transpose()?;
                LockedPlace::Database(Arc::clone(place), folder)
            }
        };
        Ok(LockedStore { place })
    }

    /// `lock`, then `LockedStore::open`.
    pub fn open(config: &StoreConfig, clock: Arc<dyn Clock>, limits: Limits) -> StoreResult<Self> {
        Self::lock(config)?.open(clock, limits, &OpenProgress::default())
    }

    /// `open` for a short command: audits only when the last stop was not orderly, and has no
    /// background audit.
    pub fn open_briefly(
        config: &StoreConfig,
        clock: Arc<dyn Clock>,
        limits: Limits,
    ) -> StoreResult<Self> {
        let locked = match config {
            StoreConfig::Embedded(_) => Self::lock(config)?,
            // What it does there is one transaction, so it may run beside a node of the folder.
            StoreConfig::Database(place) => {
                LockedStore { place: LockedPlace::Database(Arc::clone(place), None) }
            }
        };
        locked.open_with(clock, limits, AuditPolicy::AfterCrash, &OpenProgress::default())
    }

    fn start(
        backend: &Arc<impl Backend>,
        clock: Arc<dyn Clock>,
        limits: Limits,
        audit_policy: AuditPolicy,
        progress: &OpenProgress,
    ) -> StoreResult<Self> {
        let rate = limits.ledger.audit_rows_per_second;
        let prepare = || prepare(backend, clock, limits, audit_policy, progress);
        let (shared, writer) = unless_contradictory(prepare)?;
        let always = audit_policy == AuditPolicy::Always;
        let auditor = always.then(|| Auditor::start(Arc::clone(&shared), rate).map_err(unstarted));
        let auditor = auditor.transpose()?;
        let thread = thread::Builder::new().name("store-writer".into());
        // Without its writer a node could end no attempt any more, whereas a crash is followed by a
        // recovery that can.
        let run = || {
            panic::catch_unwind(AssertUnwindSafe(|| writer.run()))
                .unwrap_or_else(|_| std::process::abort());
        };
        let writer = thread.spawn(run).map_err(unstarted)?;
        let inner = StoreInner { shared, writer: Some(writer), auditor, folder: OnceLock::new() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The id of this start of the node. Every reservation it makes carries it. It changes when
    /// `request_new_boot` was called.
    pub fn boot(&self) -> BootId {
        self.inner.shared.boot()
    }

    /// Whether other nodes that share the ledger have declared this one ended, because it was not
    /// heard of for the time of a lease. It admits nothing then.
    pub fn was_ended_by_others(&self) -> bool {
        self.inner.shared.is_ended()
    }

    /// Lets this node admit again, under another boot. Nothing that it runs may go on.
    pub fn request_new_boot(&self) {
        self.inner.shared.request_new_boot();
    }

    /// How often to look for what other nodes that share the ledger decided; `None` where it is
    /// this node's own.
    pub fn look_interval(&self) -> Option<Duration> {
        self.inner.shared.reader.look_interval()
    }

    /// The nodes that share the ledger; none where it is this node's own.
    pub async fn nodes(&self) -> StoreResult<Vec<ListedNode>> {
        self.inner.shared.reader.nodes().await
    }

    /// Changes what this node says of itself to those that share the ledger. They see it after the
    /// next renewal of its lease.
    pub fn tell(&self, mut change: impl FnMut(&mut NodeFacts)) {
        self.inner.shared.reader.tell(&mut change);
    }

    /// Whether another node that shares the ledger holds its lease, as the last renewal of this
    /// node's own one saw it.
    pub fn is_alive(&self, node: Uuid) -> bool {
        self.inner.shared.reader.is_alive(node)
    }

    /// Tells the nodes that share the ledger what this one charges now, by the ids of its releases.
    /// Returns how theirs differ, in sentences.
    pub async fn tell_prices(
        &self,
        prices: BTreeMap<String, ReleasePrices>,
    ) -> StoreResult<Vec<String>> {
        self.inner.shared.reader.tell_prices(prices).await
    }

    /// The ledger's time: it judges what has expired, for reads as for the commands that follow.
    pub fn now(&self) -> UnixMillis {
        self.inner.shared.now()
    }

    /// The latest time stored in a ledger that no process has open.
    pub fn stored_time(config: &StoreConfig) -> StoreResult<UnixMillis> {
        match config {
            StoreConfig::Embedded(config) => embedded::stored_time(config),
            StoreConfig::Database(place) => place.stored_time(),
        }
    }

    /// Applies one command and returns after its commit is durable. An admission whose caller stops
    /// waiting, or is told `Unavailable`, is released; any other command may be sent again until
    /// its outcome is known.
    pub async fn submit(&self, command: Command) -> StoreResult<Outcome> {
        self.submit_with(command, None).await
    }

    /// `submit`, and stores a request's answer durably before the command, which settles it. The
    /// answer can be read until it expires.
    pub async fn submit_with(
        &self,
        command: Command,
        body: Option<(RequestKey, StoredBody)>,
    ) -> StoreResult<Outcome> {
        let action = WriteAction::new(command, body);
        let guard = AdmissionGuard::of(&action, &self.inner.shared.queue);
        let outcome = self.enqueue(action).await;
        guard.disarm();
        outcome.unwrap_or_else(|_| Err(gone()))
    }

    /// `submit` from a thread outside the runtime.
    #[cfg(any(test, feature = "testing"))]
    pub fn submit_blocking(&self, command: Command) -> StoreResult<Outcome> {
        let waiting = self.enqueue(command.into());
        waiting.blocking_recv().unwrap_or_else(|_| Err(gone()))
    }

    /// Sends a command without waiting. A start, settlement or release is never lost while the
    /// process runs: it outlasts a failure of the storage, and their number is bounded by that of
    /// open reservations.
    pub fn submit_detached(&self, command: Command) {
        self.inner.shared.queue.push(WriteJob::new(command.into(), None));
    }

    /// A consistent snapshot for reads. It contains everything acknowledged before.
    pub async fn read(&self) -> StoreResult<Box<dyn Snapshot>> {
        check_readable()?;
        self.inner.shared.reader.snapshot().await
    }

    /// The credential with this digest and its account. Refused once a rule of the ledger was found
    /// broken, because an authenticated caller spends money.
    pub async fn credential_and_account(
        &self,
        digest: &[u8; 32],
    ) -> StoreResult<Option<(Credential, Account)>> {
        self.inner.shared.health.trusted().map_err(StoreError::Unavailable)?;
        check_readable()?;
        self.inner.shared.reader.credential_and_account(digest).await
    }

    /// Stores an answer whose settlement never comes: its command names an attempt that nobody
    /// made, and is refused.
    #[cfg(any(test, feature = "testing"))]
    pub async fn put_body(
        &self,
        key: RequestKey,
        content: bytes::Bytes,
        expires_at: cresset_base::UnixMillis,
    ) -> StoreResult {
        let command = Command::Start { key, attempt: AttemptId::generate() };
        let body = Some((key, StoredBody::of(content, expires_at).await));
        match self.submit_with(command, body).await {
            Err(StoreError::Refused(_)) => Ok(()),
            other => other.map(drop),
        }
    }

    /// The stored answer of a request; `None` when there is none or it has expired.
    pub async fn body(&self, key: &RequestKey) -> StoreResult<Option<bytes::Bytes>> {
        match self.stored_body(key).await? {
            Some(body) => body.answer().await.map(Some),
            None => Ok(None),
        }
    }

    /// `body` as it is stored, with what its receipt is made from.
    pub async fn stored_body(&self, key: &RequestKey) -> StoreResult<Option<StoredBody>> {
        let shared = &self.inner.shared;
        shared.reader.body(key, shared.clock.now()).await
    }

    /// Erases the stored answers of an account, or of its requests with one id, and returns their
    /// number. An answer that is being stored meanwhile may stay. Blocks while it erases.
    pub fn erase_answers(
        &self,
        account: AccountId,
        request: Option<RequestId>,
    ) -> StoreResult<u64> {
        let (reader, mut erased) = (&self.inner.shared.reader, 0);
        loop {
            match reader.erase_answers(account, request)? {
                0 => return Ok(erased),
                some => erased += some,
            }
        }
    }

    /// The budgets of which operators were told last, oldest first.
    pub fn budget_notices(&self) -> Vec<BudgetNotice> {
        self.inner.shared.budget_notices.all()
    }

    /// Checks every invariant over everything stored. A violation stops admissions until a person
    /// has looked into it. Blocks while it reads.
    pub fn audit(&self) -> StoreResult<AuditReport> {
        self.inner.shared.audit(&audit::unpaced)
    }

    /// Audits a ledger that no process has open, also one that `open` refuses for its violations.
    /// Changes no record.
    pub fn inspect(config: &StoreConfig) -> StoreResult<AuditReport> {
        match config {
            StoreConfig::Embedded(config) => embedded::inspect(config),
            StoreConfig::Database(place) => place.inspect(),
        }
    }

    /// Copies a consistent snapshot of what `scope` names into a new file, verifies it, renames it
    /// into place. Blocks while it copies.
    pub fn backup(&self, scope: &BackupScope, to: &Path) -> StoreResult {
        check_readable()?;
        let shared = &self.inner.shared;
        shared.reader.backup(scope, to, shared.min_free_bytes)
    }

    /// Replaces a ledger that no process has open with a backup, after checking the backup. The
    /// replaced files are kept, and credentials revoked and accounts suspended in them stay so.
    pub fn restore(
        config: &StoreConfig,
        from: &Path,
        scope: RestoreScope,
    ) -> StoreResult<RestoreReport> {
        match config {
            StoreConfig::Embedded(config) => embedded::restore(config, from, scope),
            StoreConfig::Database(place) => Err(place.own_tools()),
        }
    }

    /// Takes the ledger of a folder that no process has open over into a database without one. The
    /// files are kept under other names. Blocks while it copies and audits.
    pub fn move_to(
        from: &EmbeddedConfig,
        to: &dyn DatabasePlace,
        clock: Arc<dyn Clock>,
        limits: Limits,
        hooks: &MoveHooks<'_>,
    ) -> StoreResult<MoveReport> {
        moving::run(from, to, clock, limits, hooks)
    }

    /// True while commits succeed, no audit has failed and no other node has ended this one.
    pub fn healthy(&self) -> bool {
        let health = &self.inner.shared.health;
        health.reachable() && health.trusted().is_ok() && !self.was_ended_by_others()
    }

    /// When everything was last audited; `None` where that was never, or before a crash.
    pub fn fully_audited_at(&self) -> Option<UnixMillis> {
        self.inner.shared.fully_audited_at()
    }

    /// Why new requests are refused although the ledger works: too little disk space, or files that
    /// are no longer in their place.
    pub fn admission_block(&self) -> Option<&'static str> {
        self.inner.shared.admission_block()
    }

    fn enqueue(&self, action: WriteAction) -> oneshot::Receiver<StoreResult<Outcome>> {
        let (reply, waiting) = oneshot::channel();
        self.inner.shared.queue.push(WriteJob::new(action, Some(reply)));
        waiting
    }
}

/// A ledger that this process has taken and not opened yet.
pub struct LockedStore {
    place: LockedPlace,
}

enum LockedPlace {
    Folder(Arc<dyn embedded::Disk>),
    Database(Arc<dyn DatabasePlace>, Option<FileLock>),
}

impl LockedStore {
    /// Opens the ledger, checks its pages and what came after its seal, releases the reservations
    /// of earlier boots, starts the writer and the background audit. Blocks, for minutes where
    /// there is much to audit, and as long as a database cannot be reached; `progress` says how far
    /// it is and can stop it.
    pub fn open(
        self,
        clock: Arc<dyn Clock>,
        limits: Limits,
        progress: &OpenProgress,
    ) -> StoreResult<Store> {
        self.open_with(clock, limits, AuditPolicy::Always, progress)
    }

    fn open_with(
        self,
        clock: Arc<dyn Clock>,
        limits: Limits,
        policy: AuditPolicy,
        progress: &OpenProgress,
    ) -> StoreResult<Store> {
        match self.place {
            LockedPlace::Folder(disk) => {
                let backend = Arc::new(EmbeddedBackend::open_on(disk)?);
                Store::start(&backend, clock, limits, policy, progress)
            }
            LockedPlace::Database(place, folder) => {
                let opening = StoreOpening { clock, limits, policy, progress };
                let store = database::open(&*place, &opening)?;
                folder.map(|locked| store.inner.folder.set(locked));
                Ok(store)
            }
        }
    }
}

/// When a ledger is audited: whenever it is opened and then in the background, or only when it is
/// opened after a crash.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AuditPolicy {
    Always,
    AfterCrash,
}

/// Checks and recovers an opened ledger before the first new command.
fn prepare<B: Backend>(
    backend: &Arc<B>,
    clock: Arc<dyn Clock>,
    limits: Limits,
    audit_policy: AuditPolicy,
    progress: &OpenProgress,
) -> StoreResult<(Arc<StoreShared>, Writer<B>)> {
    let (shown, stored) = (clock.now(), backend.stored_time()?);
    limits.clock.judge(shown, stored).map_err(StoreError::Unusable)?;
    let is_beside = B::IS_SHARED && audit_policy == AuditPolicy::AfterCrash;
    let crashed = backend.was_left_open()?;
    let reader = Arc::clone(backend);
    let shared =
        StoreShared::new(reader, backend.lanes(), clock, limits.requests.min_free_mib << 20);
    let shared = Arc::new(shared);
    if is_beside {
        if limits.clock.accepted {
            backend.set_time(shown)?;
        }
        if let Some(why) = backend.recorded_violation()? {
            shared.health.distrust(&why);
        }
        let writer = Writer::new(Arc::clone(backend), Arc::clone(&shared), limits);
        shared.set_floor(stored);
        return Ok((shared, writer));
    }
    shared.resume(backend.seal()?, crashed);
    failpoint!("store::opened");
    progress.enter(OpenStep::Audit);
    if (crashed || audit_policy == AuditPolicy::Always)
        && let Some(violation) =
            shared.audit_at_start(&|row| progress.note(row))?.violations.first()
    {
        return Err(StoreError::Unusable(format!(
            "the ledger breaks its own rules and is not served: {violation}; `cresset ledger audit` names every \
             violation, `cresset ledger restore` puts a backup in its place"
        )));
    }
    if crashed {
        tracing::warn!("the last stop was not orderly: what the ledger was doing then is intact");
    }
    progress.enter(OpenStep::Recovery);
    backend.claim(shared.boot())?;
    let is_clock_accepted = limits.clock.accepted;
    let mut writer = Writer::new(Arc::clone(backend), Arc::clone(&shared), limits);
    writer.recover()?;
    // After the recovery no attempt is open, so none ends before it began.
    if is_clock_accepted {
        backend.set_time(shown)?;
    }
    shared.set_floor(backend.stored_time()?);
    Ok((shared, writer))
}

/// Lets tests fail every read.
#[cfg_attr(
    not(feature = "failpoints"),
    expect(clippy::unnecessary_wraps, reason = "it fails in tests alone")
)]
fn check_readable() -> StoreResult {
    failpoint!("store::read", |_| Err(StoreError::Unavailable("a read failed".into())));
    Ok(())
}

/// What `open` returns. The database panics on some damaged pages.
fn unless_contradictory<T>(open: impl FnOnce() -> StoreResult<T>) -> StoreResult<T> {
    panic::catch_unwind(AssertUnwindSafe(open)).unwrap_or_else(|_| {
        let why = "the pages of the ledger's files contradict each other: keep a copy of them and restore a backup";
        Err(StoreError::Unusable(why.into()))
    })
}

#[expect(clippy::needless_pass_by_value, reason = "the shape that map_err asks for")]
fn unstarted(error: std::io::Error) -> StoreError {
    StoreError::Unavailable(format!("a thread cannot be started: {error}"))
}

fn gone() -> StoreError {
    StoreError::Unavailable("its writer stopped".into())
}

/// Releases an admission whose caller is dropped before it was told the outcome.
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

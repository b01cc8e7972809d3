//! The backend in a PostgreSQL database, which nodes on several machines can reach. Nothing outside
//! this crate knows its tables or its client. It speaks plain SQL: no functions, triggers,
//! advisory locks or notifications of its own.
//!
//! A batch takes two round trips, whatever its size: one that locks the accounts and reads what the
//! commands need (`reading`), one that writes what they changed and commits (`writing`). In between
//! `apply` runs over rows in memory (`state`). Each account has a journal chain of its own.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod audit_source;
mod clock;
mod config;
mod distrust;
mod driver;
mod failure;
mod keys;
mod lookups;
mod nodes;
mod origin;
mod peers;
mod place;
mod pool;
mod reading;
mod retention;
mod rows;
mod schema;
mod scratch;
mod seal;
mod server;
mod session;
mod snapshot;
mod state;
mod taking_over;
#[cfg(test)]
mod tests;
mod tls;
mod watch;
mod writing;

use audit_source::AuditReading;
use clock::DatabaseClock;
pub use config::PostgresConfig;
use cresset_base::{AccountId, BootId, Clock, RequestId, UnixMillis, failpoint};
use cresset_ledger::audit::{AuditPace, AuditSource};
use cresset_ledger::{Account, Credential, RequestKey, StateError, StateResult};
use cresset_store::{
    Backend, BackupScope, BatchFailure, LedgerReader, Limits, ListedNode, NodeFacts, OtherNodes,
    ReadFuture, ReleasePrices, Seal, Snapshot, StoreError, StoreResult, StoredBody, WriteAction,
};
use driver::Driver;
use failure::Failure;
use keys::Keys;
use lookups::Lookups;
use nodes::Tenure;
use parking_lot::{Mutex, MutexGuard};
use peers::ToldFacts;
use pool::SessionPool;
use rows::BatchRows;
use rustix::fs::statvfs;
use session::{Ask, Connector, DatabaseSession, SessionKind};
use state::BatchState;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use uuid::Uuid;

/// How often a batch is tried that others come before. Each time somebody got ahead.
const MAX_RACES: u32 = 20;
/// Lanes of the writer. Batches get smaller with each, and more would wait for the cores of most
/// databases.
const MAX_LANES: usize = 8;
/// How long a reader waits for the database.
const READ: Duration = Duration::from_secs(10);

struct PostgresBackend {
    place: PostgresConfig,
    driver: Driver,
    connector: Arc<Connector>,
    /// The sessions of the writer's lanes. That of the first one is `None` while a failed one is
    /// being replaced; the others are made when they are needed.
    lanes: Box<[Mutex<Option<DatabaseSession>>]>,
    pool: Arc<SessionPool>,
    lookups: Lookups,
    /// False from a failure to reopen until a success, and after the end.
    is_open: AtomicBool,
    /// What this node says of itself to the others.
    about: Arc<ToldFacts>,
    /// The time of the database, once somebody keeps it.
    clock: OnceLock<Arc<DatabaseClock>>,
    /// What this process holds in the table of nodes, once it has claimed the ledger.
    tenure: Mutex<Option<Tenure>>,
    /// Whether opening it found a node that had ended.
    was_left_open: AtomicBool,
    /// Whether the ledger was not trusted when its seal was read.
    was_distrusted: AtomicBool,
}

impl PostgresBackend {
    /// `open_beside`, and ends the nodes that are not heard of any more, which takes a lease.
    fn open(place: &PostgresConfig) -> StoreResult<Self> {
        let this = Self::open_beside(place)?;
        let connector = &this.connector;
        this.with_writer(async |session| {
            let other = connector.connect(SessionKind::Reader).await?;
            server::check_session(session, &other).await
        })?;
        let ended =
            this.with_writer(async |session| nodes::end_silent_others(session, place.lease).await)?;
        this.was_left_open.store(ended, Ordering::Release);
        Ok(this)
    }

    /// Connects, checks server and tables.
    fn open_beside(place: &PostgresConfig) -> StoreResult<Self> {
        let driver = Driver::start()?;
        let connector = Arc::new(Connector::new(place, driver.handle()));
        let writer = driver.wait(async {
            let session = connect_writer(&connector, place.standbys()).await?;
            schema::check(&session).await?;
            Ok::<_, StoreError>(session)
        })?;
        let connections = place.settings.connections;
        let others = (1..connections.min(MAX_LANES)).map(|_| Mutex::default());
        let pool = Arc::new(SessionPool::new(Arc::clone(&connector), connections));
        Ok(Self {
            place: place.clone(),
            lookups: Lookups::start(Arc::clone(&connector)),
            driver,
            connector,
            lanes: std::iter::once(Mutex::new(Some(writer))).chain(others).collect(),
            pool,
            is_open: AtomicBool::new(true),
            clock: OnceLock::new(),
            tenure: Mutex::default(),
            was_left_open: AtomicBool::new(false),
            was_distrusted: AtomicBool::new(false),
            about: Arc::new(ToldFacts::new(place.about.clone())),
        })
    }

    /// The database's time, which goes on with this machine's clock. Renewals of the lease set it
    /// again.
    fn keep_time(&self, own: Arc<dyn Clock>) -> StoreResult<Arc<dyn Clock>> {
        let clock = Arc::new(DatabaseClock::new(own));
        self.with_writer(async |session| clock.set(session).await)?;
        Ok(Arc::clone(self.clock.get_or_init(|| clock)) as Arc<dyn Clock>)
    }

    /// The session of a lane, connected where it can be.
    fn open_lane(&self, lane: usize) -> StoreResult<MutexGuard<'_, Option<DatabaseSession>>> {
        let mut found = self.lanes[lane].lock();
        self.check_open()?;
        if found.is_none() && lane > 0 {
            let connecting = connect_writer(&self.connector, self.place.standbys());
            *found = Some(self.driver.wait(connecting)?);
        }
        Ok(found)
    }

    fn check_open(&self) -> Result<(), Failure> {
        if self.is_open.load(Ordering::Acquire) { Ok(()) } else { Err(closed()) }
    }

    fn boot(&self) -> Option<BootId> {
        self.tenure.lock().as_ref().map(|tenure| tenure.boot)
    }

    /// `work` in the session of the first lane.
    fn with_writer<T, E: From<Failure>>(
        &self,
        work: impl AsyncFnOnce(&DatabaseSession) -> Result<T, E>,
    ) -> Result<T, E> {
        match &*self.lanes[0].lock() {
            Some(session) => self.driver.wait(work(session)),
            None => Err(closed().into()),
        }
    }

    /// `work` with a session for reads.
    async fn read<T>(
        &self,
        work: impl AsyncFnOnce(&DatabaseSession) -> StateResult<T>,
    ) -> StoreResult<T> {
        self.check_open()?;
        let reading = async {
            let session = self.pool.take().await?;
            let done = work(&session).await;
            session.give_back();
            Ok(done)
        };
        Ok(self.connector.within(READ, reading).await??)
    }

    /// One try of a batch. The outer error is that of a database, after which another try may
    /// succeed.
    fn attempt<T>(
        &self,
        session: &DatabaseSession,
        actions: &[&WriteAction],
        now: UnixMillis,
        run: &mut impl FnMut(&mut BatchState<'_>) -> Result<T, BatchFailure>,
    ) -> Result<Result<T, BatchFailure>, Failure> {
        let keys = Keys::of(actions);
        let mut rows = BatchRows::default();
        let boot = self.boot();
        let beginning = reading::begin(session, boot, &keys, &mut rows);
        let may_admit = self.driver.wait(beginning)?;
        let mut state = BatchState::new(&self.driver, session, now, boot, (may_admit, rows));
        let result = run(&mut state);
        let rows = state.finish()?;
        let changed = rows.has_changed() && result.is_ok();
        if !changed {
            self.driver.wait(session.script("rollback"))?;
            return Ok(result);
        }
        failpoint!("store::before_commit");
        failpoint!("store::commit_lost", |_| {
            drop(self.driver.wait(session.script("rollback")));
            Ok(Err(BatchFailure::InDoubt("the commit failed".into())))
        });
        let doubts = session.doubts();
        self.driver.wait(session.pipeline(writing::writes(&rows, actions)))?;
        failpoint!("store::after_commit");
        failpoint!("store::commit_unknown", |_| Ok(Err(BatchFailure::InDoubt(
            "the commit failed".into()
        ))));
        if let Err(failure) = self.driver.wait(nodes::confirm(session, boot, doubts)) {
            return Ok(Err(failure.into()));
        }
        Ok(result)
    }
}

fn closed() -> Failure {
    Failure::lost("it is being reopened")
}

/// A session for batches, at a server that keeps what it acknowledges.
async fn connect_writer(connector: &Arc<Connector>, standbys: u32) -> StoreResult<DatabaseSession> {
    let session = connector.connect(SessionKind::Writer).await?;
    server::check(&session, standbys).await?;
    Ok(session)
}

impl LedgerReader for PostgresBackend {
    fn snapshot(&self) -> ReadFuture<'_, Box<dyn Snapshot>> {
        Box::pin(async {
            self.check_open()?;
            let taking = snapshot::take(&self.pool);
            let snapshot = self.connector.within(READ, taking).await?;
            Ok(Box::new(snapshot) as Box<dyn Snapshot>)
        })
    }

    fn credential_and_account(
        &self,
        digest: &[u8; 32],
    ) -> ReadFuture<'_, Option<(Credential, Account)>> {
        let digest = *digest;
        Box::pin(async move {
            self.check_open()?;
            let found = async { Ok(self.lookups.find(digest).await) };
            self.connector.within(READ, found).await?
        })
    }

    fn body(&self, key: &RequestKey, now: UnixMillis) -> ReadFuture<'_, Option<StoredBody>> {
        let key = *key;
        Box::pin(self.read(async move |session| snapshot::body(session, &key, now).await))
    }

    fn audit_source(&self) -> StoreResult<Box<dyn AuditSource + '_>> {
        Ok(Box::new(AuditReading::begin(&self.driver, &self.connector)?))
    }

    /// The database keeps the journal as one table.
    fn close_journal_part(&self, _: AuditPace<'_>) -> StoreResult<bool> {
        Ok(false)
    }

    fn backup(&self, _: &BackupScope, _: &Path, _: u64) -> StoreResult {
        Err(own_tools())
    }

    fn erase_answers(&self, account: AccountId, request: Option<RequestId>) -> StoreResult<u64> {
        let erasing =
            self.read(async move |session| Ok(retention::erase(session, account, request).await?));
        self.driver.wait(erasing)
    }

    /// Those of the data folder: the database's machine may be another.
    fn free_bytes(&self) -> Option<u64> {
        let found = statvfs(self.place.folder.as_ref()?).ok()?;
        Some(found.f_bavail.saturating_mul(found.f_frsize))
    }

    fn file_bytes(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::new()
    }

    fn look_interval(&self) -> Option<Duration> {
        Some(self.place.lease / nodes::RENEWALS)
    }

    fn nodes(&self) -> ReadFuture<'_, Vec<ListedNode>> {
        Box::pin(self.read(async |session| Ok(peers::list(session).await?)))
    }

    fn tell(&self, change: &mut dyn FnMut(&mut NodeFacts)) {
        change(&mut self.about.facts.lock());
    }

    fn is_alive(&self, node: Uuid) -> bool {
        self.tenure.lock().as_ref().is_some_and(|tenure| tenure.heard.alive.lock().contains(&node))
    }

    fn tell_prices(&self, prices: BTreeMap<String, ReleasePrices>) -> ReadFuture<'_, Vec<String>> {
        self.about.facts.lock().prices = prices;
        let (boot, told) = (self.boot().unwrap_or(BootId(Uuid::nil())), &self.about);
        let telling = self.read(async move |session| Ok(peers::tell(session, boot, told).await?));
        Box::pin(telling)
    }

    /// A database that moves takes its name along.
    fn is_in_place(&self) -> bool {
        true
    }
}

impl Backend for PostgresBackend {
    const IS_SHARED: bool = true;
    type Txn<'t> = BatchState<'t>;

    fn was_left_open(&self) -> StateResult<bool> {
        Ok(self.was_left_open.load(Ordering::Acquire))
    }

    /// None of a ledger that is not trusted.
    fn seal(&self) -> StateResult<Option<Seal>> {
        let distrusted = self.recorded_violation()?.is_some();
        // At a start, which audits everything then.
        if self.tenure.lock().is_none() {
            self.was_distrusted.store(distrusted, Ordering::Release);
        }
        if distrusted { Ok(None) } else { self.with_writer(seal::read) }
    }

    fn recorded_violation(&self) -> StateResult<Option<String>> {
        let told = self.with_writer(async |session| session.ask(distrust::ask()).await)?;
        Ok(distrust::read(&told))
    }

    fn record_violation(&self, why: &str) -> StateResult {
        Ok(self.with_writer(async |session| distrust::tell(session, why).await)?)
    }

    fn set_seal(&self, seal: Option<&Seal>) -> StateResult {
        self.with_writer(async |session| Ok(seal::write(session, seal).await?))
    }

    fn stored_time(&self) -> StateResult<UnixMillis> {
        let latest = Ask::new("select coalesce(max(clock), 0) from accounts");
        let found = self.with_writer(async |session| session.ask(latest).await)?;
        let latest: i64 = found.rows.first().map_or(0, |row| row.get(0));
        Ok(UnixMillis(u64::try_from(latest).unwrap_or_default()))
    }

    fn set_time(&self, _: UnixMillis) -> StateResult {
        let why = "a ledger in a database goes by the database's clock, which nobody can vouch for here: start \
                   without --accept-clock";
        Err(StateError::Io(why.into()))
    }

    fn claim(&self, boot: BootId) -> StoreResult {
        let (lease, about) = (self.place.lease, self.about.facts.lock().clone());
        // Under another boot a node goes on with what the others have been told.
        let is_first = self.tenure.lock().is_none();
        // Everything was audited since, as there was no seal.
        let is_sound = self.was_distrusted.swap(false, Ordering::AcqRel);
        self.with_writer(async |session| {
            nodes::claim(session, boot, lease, (&about, is_first)).await?;
            if is_sound {
                distrust::clear(session).await?;
            }
            Ok::<_, StoreError>(())
        })?;
        failpoint!("store::claimed");
        let (about, connector) = (Arc::clone(&self.about), Arc::clone(&self.connector));
        let clock = self.clock.get().cloned();
        *self.tenure.lock() = Some(Tenure::begin(boot, lease, about, connector, clock));
        Ok(())
    }

    fn lanes(&self) -> usize {
        self.lanes.len()
    }

    fn transact<T>(
        &self,
        lane: usize,
        actions: &[&WriteAction],
        now: UnixMillis,
        mut run: impl FnMut(&mut BatchState<'_>) -> Result<T, BatchFailure>,
    ) -> Result<T, BatchFailure> {
        let opened = self.open_lane(lane).map_err(|why| BatchFailure::InDoubt(why.to_string()))?;
        let session = opened.as_ref().ok_or_else(closed)?;
        let mut races = 0;
        loop {
            let failure = match self.attempt(session, actions, now, &mut run) {
                Ok(result) => return result,
                Err(failure) => failure,
            };
            races += 1;
            if !failure.is_race() || races >= MAX_RACES {
                return Err(failure.into());
            }
            tracing::debug!(%failure, races, "a batch is tried again");
            // After a commit there is no transaction any more, which is only a warning.
            self.driver.wait(session.script("rollback"))?;
        }
    }

    fn sweep(&self, now: UnixMillis, limits: &Limits) -> StateResult<bool> {
        self.with_writer(async |session| Ok(retention::sweep(session, now, limits).await?))
    }

    fn other_nodes(&self) -> OtherNodes {
        let tenure = self.tenure.lock();
        let Some(Tenure { heard, .. }) = tenure.as_ref() else { return OtherNodes::default() };
        OtherNodes {
            left_behind: heard.left_behind.swap(false, Ordering::AcqRel),
            have_ended_this: heard.is_ended.load(Ordering::Acquire),
            distrust: heard.distrust.get().cloned(),
            do_the_maintenance: !heard.is_first.load(Ordering::Acquire),
        }
    }

    fn can_reopen(&self) -> bool {
        true
    }

    fn reopen(&self, check: impl FnOnce(&dyn AuditSource) -> StoreResult) -> StoreResult {
        self.is_open.store(false, Ordering::Release);
        (0..self.lanes()).for_each(|lane| drop(self.lanes[lane].lock().take()));
        failpoint!("store::reopen", |_| Err(StoreError::Unavailable("it stays closed".into())));
        let boot = self.boot();
        let session = self.driver.wait(async {
            let session = connect_writer(&self.connector, self.place.standbys()).await?;
            nodes::wait_for_own(&session, boot).await?;
            Ok::<_, StoreError>(session)
        })?;
        check(&AuditReading::begin(&self.driver, &self.connector)?)?;
        *self.lanes[0].lock() = Some(session);
        self.is_open.store(true, Ordering::Release);
        Ok(())
    }

    fn close(&self, boot: BootId, clean: bool) -> StateResult {
        drop(self.tenure.lock().take());
        let left = self.with_writer(async |session| nodes::leave(session, boot, clean).await);
        self.is_open.store(false, Ordering::Release);
        drop(self.lanes[0].lock().take());
        Ok(left?)
    }
}

/// Why no backup of this program is made or restored.
fn own_tools() -> StoreError {
    let why = "a ledger in a database is copied and restored with the database's own tools: use pg_dump, or \
               pg_basebackup, and their counterparts";
    StoreError::Unusable(why.into())
}

fn with_session<T>(
    place: &PostgresConfig,
    work: impl AsyncFnOnce(&DatabaseSession) -> StoreResult<T>,
) -> StoreResult<T> {
    let driver = Driver::start()?;
    let connector = Arc::new(Connector::new(place, driver.handle()));
    driver.wait(async { work(&connector.connect(SessionKind::Writer).await?).await })
}

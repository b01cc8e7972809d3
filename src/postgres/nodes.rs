//! The table of nodes: who uses the ledger, and until when that is certain. Times are those of the
//! database's clock alone.
//!
//! Each node renews its lease as long as it lives. One whose lease has run out and that `watch` has
//! found silent is declared ended by another; what it had reserved is released then. Whatever such
//! a node does later sees that (fencing): it admits nothing, and an end that it brings is decided
//! by the record, as any repeated end is.

use super::clock::DatabaseClock;
use super::distrust;
use super::failure::Failure;
use super::peers::{self, ToldFacts};
use super::reading::ACTIVE;
use super::session::{Ask, Connector, DatabaseSession};
use super::session::{QueryAnswer, SessionKind};
use super::watch::{OtherLease, Watch};
use cresset_base::BootId;
use cresset_store::{NodeFacts, StoreError, StoreResult};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::sleep;
use uuid::Uuid;

/// States of a node's row. The third, an active node, is 0.
const ENDED: i16 = 1;
const LEFT: i16 = 2;

/// Renewals in the time of a lease.
pub(super) const RENEWALS: u32 = 5;

/// The leases of the other nodes: their ends in microseconds, and whether that time has come.
const OTHERS: &str = "select boot, (extract(epoch from lease_until) * 1000000)::bigint, \
    lease_until <= clock_timestamp() from nodes where state = 0 and boot <> $1";
/// Whether a node that has ended left reservations.
const LEFT_BEHIND: &str = "select exists (select 1 from reservations r \
    where not exists (select 1 from nodes n where n.boot = r.boot and n.state = 0))";
/// Ended nodes of which nothing is left.
const FORGET: &str = "delete from nodes n where state <> 0 and boot <> $1 \
    and not exists (select 1 from reservations r where r.boot = n.boot)";
/// Waits for transactions that these nodes have open. A node that renewed meanwhile goes on.
const END_SILENT: &str = "with silent as materialized (select boot from nodes \
        where boot = any($1) and state = 0 and lease_until <= clock_timestamp() for update) \
    update nodes n set state = $2 from silent s where n.boot = s.boot";
const REGISTER: &str = "insert into nodes (boot, state, lease_until, about) \
    values ($1, 0, clock_timestamp() + $2::float8 * interval '1 millisecond', $3) \
    on conflict (boot) do update set lease_until = excluded.lease_until";
const RENEW: &str = "update nodes set \
    lease_until = clock_timestamp() + $2::float8 * interval '1 millisecond', about = $3 \
    where boot = $1 and state = 0";
const LEAVE: &str = "update nodes set state = $2, lease_until = clock_timestamp() \
    where boot = $1 and state = 0";
const CONFIRM: &str = "update nodes set confirmed = confirmed + 1 where boot = $1";

/// What this process holds in the table. It is renewed until it is dropped.
pub(super) struct Tenure {
    pub boot: BootId,
    pub renewing: AbortHandle,
    pub heard: Arc<Heard>,
}

/// What the renewals of a lease heard.
#[derive(Default)]
pub(super) struct Heard {
    /// Nodes that have ended hold reservations.
    pub left_behind: AtomicBool,
    /// Another node has declared this one ended.
    pub is_ended: AtomicBool,
    /// No other node began before this one.
    pub is_first: AtomicBool,
    /// Why a node found the ledger broken.
    pub distrust: OnceLock<String>,
    /// The other nodes whose leases run.
    pub alive: Mutex<Vec<Uuid>>,
}

impl Tenure {
    pub(super) fn begin(
        boot: BootId,
        lease: Duration,
        about: Arc<ToldFacts>,
        connector: Arc<Connector>,
        clock: Option<Arc<DatabaseClock>>,
    ) -> Self {
        let handle = connector.handle.clone();
        let heard = Arc::<Heard>::default();
        let own = Arc::clone(&heard);
        let renewals = Renewals { boot, lease, about, connector, clock, heard: own };
        let renewing = handle.spawn(renewals.run()).abort_handle();
        Self { boot, renewing, heard }
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        self.renewing.abort();
    }
}

struct Renewals {
    boot: BootId,
    lease: Duration,
    about: Arc<ToldFacts>,
    connector: Arc<Connector>,
    clock: Option<Arc<DatabaseClock>>,
    heard: Arc<Heard>,
}

impl Renewals {
    async fn run(self) {
        let mut session: Option<DatabaseSession> = None;
        let mut watch = Watch::new(self.lease);
        loop {
            sleep(self.lease / RENEWALS).await;
            let renewed = self.renew_in(session.take(), &mut watch);
            match self.connector.within(self.lease, renewed).await {
                Ok(kept) => session = Some(kept),
                Err(failure) => tracing::warn!(%failure, "the lease could not be renewed"),
            }
            if self.heard.is_ended.load(Ordering::Acquire) {
                tracing::error!("another node has declared this one ended: it admits nothing");
                return;
            }
        }
    }

    /// Renews the lease in this session, or in a new one, and ends nodes that are silent.
    async fn renew_in(
        &self,
        session: Option<DatabaseSession>,
        watch: &mut Watch,
    ) -> Result<DatabaseSession, Failure> {
        let session = match session.filter(|session| !session.is_closed()) {
            Some(session) => session,
            None => self.connector.connect(SessionKind::Reader).await?,
        };
        if let Some(clock) = &self.clock {
            clock.set(&session).await?;
        }
        let (others, left_behind) = self.renew(&session).await?;
        let ended = match watch.look(&others) {
            silent if silent.is_empty() || self.heard.is_ended.load(Ordering::Acquire) => 0,
            silent => end_silent(&session, silent).await?,
        };
        self.heard.left_behind.fetch_or(left_behind || ended > 0, Ordering::AcqRel);
        Ok(session)
    }

    /// Renews the lease and notes what others did. Returns their leases, and whether nodes that
    /// have ended left reservations.
    async fn renew(&self, session: &DatabaseSession) -> Result<(Vec<OtherLease>, bool), Failure> {
        let renew = Ask::new(RENEW).with(self.boot.0).with(milliseconds(self.lease));
        let (_turn, about) = self.about.turn().await;
        let renew = renew.with(peers::text(&about));
        let asks = vec![renew, others_of(self.boot.0), Ask::new(LEFT_BEHIND), distrust::ask()];
        let answers = session.pipeline(asks).await?;
        let [renewed, others, left_behind, distrust] = &answers[..] else {
            return Err(Failure::lost("it did not answer each question"));
        };
        self.heard.is_ended.store(renewed.affected == 0, Ordering::Release);
        if let Some(why) = distrust::read(distrust) {
            self.heard.distrust.get_or_init(|| why);
        }
        let others = leases(others);
        let is_first = others.iter().all(|other| self.boot.0 < other.boot);
        self.heard.is_first.store(is_first, Ordering::Release);
        let alive = others.iter().filter(|other| !other.has_run_out).map(|other| other.boot);
        *self.heard.alive.lock() = alive.collect();
        Ok((others, left_behind.rows.first().is_some_and(|row| row.get(0))))
    }
}

fn others_of(boot: Uuid) -> Ask {
    Ask::new(OTHERS).with(boot)
}

fn leases(answer: &QueryAnswer) -> Vec<OtherLease> {
    let lease = |row: &tokio_postgres::Row| OtherLease {
        boot: row.get(0),
        until: row.get(1),
        has_run_out: row.get(2),
    };
    answer.rows.iter().map(lease).collect()
}

/// Declares these nodes ended, unless they were heard of meanwhile, and returns how many.
async fn end_silent(session: &DatabaseSession, silent: Vec<Uuid>) -> Result<u64, Failure> {
    let ended = session.ask(Ask::new(END_SILENT).with(silent.clone()).with(ENDED)).await?.affected;
    tracing::warn!(?silent, ended, "nodes that were not heard of have ended");
    Ok(ended)
}

fn milliseconds(span: Duration) -> f64 {
    span.as_secs_f64() * 1e3
}

/// Returns once each other node has been heard of, or has been declared ended. True where one was.
pub(super) async fn end_silent_others(
    session: &DatabaseSession,
    lease: Duration,
) -> StoreResult<bool> {
    let (mut watch, mut has_ended) = (Watch::new(lease), false);
    loop {
        let others = leases(&session.ask(others_of(Uuid::nil())).await?);
        let silent = watch.look(&others);
        if !silent.is_empty() {
            has_ended |= end_silent(session, silent).await? > 0;
        } else if watch.has_heard_of_all(&others) {
            return Ok(has_ended);
        }
        sleep(lease / RENEWALS).await;
    }
}

/// Registers this node. With `compare` it fails where another one has other settings of what both
/// promise.
pub(super) async fn claim(
    session: &DatabaseSession,
    boot: BootId,
    lease: Duration,
    (about, compare): (&NodeFacts, bool),
) -> StoreResult {
    session.script("begin").await?;
    session.ask(Ask::new(peers::ONE_BY_ONE)).await?;
    let compared = if compare { peers::compare(session, about).await? } else { Ok(()) };
    if let Err(difference) = compared {
        session.script("rollback").await?;
        return Err(StoreError::Unusable(difference));
    }
    session.ask(Ask::new(FORGET).with(boot.0)).await?;
    let register = Ask::new(REGISTER).with(boot.0).with(milliseconds(lease));
    session.ask(register.with(peers::text(about))).await?;
    let doubts = session.doubts();
    session.script("commit").await?;
    Ok(confirm(session, Some(boot), doubts).await?)
}

/// Returns once no earlier transaction of this boot is open: what was in doubt is decided then.
pub(super) async fn wait_for_own(
    session: &DatabaseSession,
    boot: Option<BootId>,
) -> Result<(), Failure> {
    let Some(boot) = boot else { return Ok(()) };
    session.ask(Ask::new("select 1 from nodes where boot = $1 for update").with(boot.0)).await?;
    Ok(())
}

/// Ends the use of the ledger. After a stop that was not orderly the node counts as one that is not
/// heard of any more.
pub(super) async fn leave(
    session: &DatabaseSession,
    boot: BootId,
    clean: bool,
) -> Result<(), Failure> {
    let state = if clean { LEFT } else { ACTIVE };
    session.ask(Ask::new(LEAVE).with(boot.0).with(state)).await?;
    Ok(())
}

/// Returns once the last commit of this session has reached the standbys, where `doubts` counts
/// the warnings before it. A commit whose wait for them was cancelled reports success, its rows are
/// seen by all, and a failover loses them. Once a later commit on the same server has reached the
/// standbys, so has that one.
pub(super) async fn confirm(
    session: &DatabaseSession,
    boot: Option<BootId>,
    mut doubts: u64,
) -> Result<(), Failure> {
    while session.doubts() != doubts {
        let boot =
            boot.ok_or_else(|| Failure::lost("a commit may not have reached the standbys"))?;
        doubts = session.doubts();
        if session.ask(Ask::new(CONFIRM).with(boot.0)).await?.affected == 0 {
            return Err(Failure::lost("a commit may not have reached the standbys"));
        }
    }
    Ok(())
}

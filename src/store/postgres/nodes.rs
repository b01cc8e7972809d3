//! The table of nodes: who uses the ledger, and until when that is certain. Times are those of the
//! database's clock alone.
//!
//! One node uses a ledger at a time. It renews its lease as long as it lives; a node whose lease
//! has run out is declared ended by the next start, before its reservations are released. Whatever
//! such a node does later sees that: it admits nothing, and an end that it brings is decided by the
//! record, as any repeated end is.

use super::failure::Failure;
use super::reading::ACTIVE;
use super::session::{Ask, Connector, DatabaseSession, QueryAnswer, SessionKind};
use crate::ids::BootId;
use crate::ledger::state::{StateError, StateResult};
use crate::store::{StoreError, StoreResult};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::sleep;
use uuid::Uuid;

/// Of the states of a node, `ACTIVE` is 0.
const ENDED: i16 = 1;
const LEFT: i16 = 2;

/// Renewals in the time of a lease.
const RENEWALS: u32 = 5;

/// Active nodes whose lease runs, and for how many milliseconds more.
const ALIVE: &str = "select boot, extract(epoch from lease_until - clock_timestamp())::float8 * 1000 \
    from nodes where state = 0 and lease_until > clock_timestamp()";
/// One claim at a time.
const ONE_BY_ONE: &str = "select 1 from meta where key = 'identity' for update";
/// Ended nodes of which nothing is left.
const FORGET: &str = "delete from nodes n where state <> 0 and boot <> $1 \
    and not exists (select 1 from reservations r where r.boot = n.boot)";
/// Waits for transactions that these nodes have open.
const WAIT_FOR_DEAD: &str = "select boot from nodes where state = 0 and boot <> $1 for update";
const END_DEAD: &str = "update nodes set state = $2 where state = 0 and boot <> $1";
const REGISTER: &str = "insert into nodes (boot, state, lease_until) \
    values ($1, 0, clock_timestamp() + $2::float8 * interval '1 millisecond') \
    on conflict (boot) do update set lease_until = excluded.lease_until";
const RENEW: &str = "update nodes set \
    lease_until = clock_timestamp() + $2::float8 * interval '1 millisecond' \
    where boot = $1 and state = 0";
const LEAVE: &str = "update nodes set state = $2, lease_until = clock_timestamp() \
    where boot = $1 and state = 0";
const CONFIRM: &str = "update nodes set confirmed = confirmed + 1 where boot = $1";

/// What this process holds in the table. It is renewed until it is dropped.
pub(super) struct Tenure {
    pub boot: BootId,
    pub renewing: AbortHandle,
}

impl Tenure {
    pub(super) fn begin(boot: BootId, lease: Duration, connector: Arc<Connector>) -> Self {
        let handle = connector.handle.clone();
        let renewing = handle.spawn(renew(boot, lease, connector)).abort_handle();
        Self { boot, renewing }
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        self.renewing.abort();
    }
}

async fn renew(boot: BootId, lease: Duration, connector: Arc<Connector>) {
    let mut session: Option<DatabaseSession> = None;
    loop {
        sleep(lease / RENEWALS).await;
        let renewed = renewed_in(session.take(), boot, lease, &connector);
        match connector.within(lease, renewed).await {
            Ok((kept, renewed)) => {
                session = Some(kept);
                if !renewed {
                    tracing::error!(
                        "another node has taken the ledger over: this one admits nothing any more"
                    );
                    return;
                }
            }
            Err(failure) => tracing::warn!(%failure, "the lease could not be renewed"),
        }
    }
}

/// Renews the lease in this session, or in a new one. Returns the session, and whether the lease
/// was still this node's.
async fn renewed_in(
    session: Option<DatabaseSession>,
    boot: BootId,
    lease: Duration,
    connector: &Arc<Connector>,
) -> Result<(DatabaseSession, bool), Failure> {
    let session = match session.filter(|session| !session.is_closed()) {
        Some(session) => session,
        None => connector.connect(SessionKind::Reader).await?,
    };
    let ask = Ask::new(RENEW).with(boot.0).with(milliseconds(lease));
    let is_own = session.ask(ask).await?.affected > 0;
    Ok((session, is_own))
}

fn milliseconds(span: Duration) -> f64 {
    span.as_secs_f64() * 1e3
}

/// Returns once no other node's lease runs. A node that is alive renews its own again and again,
/// and then this fails. One renewal is no proof: it may have been on its way when its node ended.
pub(super) async fn wait_for_others(session: &DatabaseSession) -> StoreResult {
    let mut seen: HashMap<Uuid, (f64, u32)> = HashMap::new();
    loop {
        let alive = alive(session).await?;
        let Some((boot, left)) = alive.iter().max_by(|a, b| a.1.total_cmp(&b.1)) else {
            return Ok(());
        };
        if !seen.contains_key(boot) {
            tracing::info!(%boot, "waiting for the end of a node that used the ledger");
        }
        let pause = Duration::from_secs_f64(left.max(1.0) / 1e3 / f64::from(RENEWALS));
        for (boot, left) in alive {
            let (before, renewals) = seen.entry(boot).or_insert((left, 0));
            *renewals += u32::from(left > *before);
            *before = left;
            if *renewals > 1 {
                return Err(StoreError::InUse(in_use(boot)));
            }
        }
        sleep(pause).await;
    }
}

async fn alive(session: &DatabaseSession) -> Result<Vec<(Uuid, f64)>, Failure> {
    let QueryAnswer { rows, .. } = session.ask(Ask::new(ALIVE)).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

fn in_use(boot: Uuid) -> String {
    format!(
        "another node uses the ledger in the database, under the start {boot}, and one node uses it at a time: stop that \
         one"
    )
}

/// Declares every other node ended and registers this one, or does neither.
pub(super) async fn claim(session: &DatabaseSession, boot: BootId, lease: Duration) -> StateResult {
    session.script("begin").await?;
    session.ask(Ask::new(ONE_BY_ONE)).await?;
    if let Some((other, _)) = alive(session).await?.into_iter().find(|(other, _)| *other != boot.0)
    {
        session.script("rollback").await?;
        return Err(StateError::Io(in_use(other)));
    }
    session.ask(Ask::new(FORGET).with(boot.0)).await?;
    session.ask(Ask::new(WAIT_FOR_DEAD).with(boot.0)).await?;
    session.ask(Ask::new(END_DEAD).with(boot.0).with(ENDED)).await?;
    session.ask(Ask::new(REGISTER).with(boot.0).with(milliseconds(lease))).await?;
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

/// Whether the node that used the ledger last did not leave it.
pub(super) async fn was_left_open(session: &DatabaseSession) -> Result<bool, Failure> {
    let ask = Ask::new("select 1 from nodes where state = $1 limit 1").with(ACTIVE);
    Ok(!session.ask(ask).await?.rows.is_empty())
}

/// Ends the use of the ledger. A stop that was not orderly leaves the node active, without a lease.
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

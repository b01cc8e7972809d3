//! What nodes say of themselves to those that use the same ledger, in the table of nodes.

use super::failure::Failure;
use super::session::{Ask, DatabaseSession};
use cresset_base::BootId;
use cresset_store::{ListedNode, NodeFacts};
use parking_lot::Mutex;
use tokio::sync;
use uuid::Uuid;

const OTHERS: &str = "select about from nodes where state = 0 and boot <> $1";
const TELL: &str = "update nodes set about = $2 where boot = $1";
/// One node at a time tells of itself, so that of two that differ the later one finds it.
pub(super) const ONE_BY_ONE: &str = "select 1 from meta where key = 'format' for update";
const ALL: &str = "select boot, state, extract(epoch from lease_until - clock_timestamp())::float8, \
    about, (select count(*) from reservations r where r.boot = n.boot) from nodes n order by boot";

/// What this node says of itself, as it is with the next renewal of its lease.
#[derive(Default)]
pub(super) struct ToldFacts {
    pub facts: Mutex<NodeFacts>,
    sending: sync::Mutex<()>,
}

impl ToldFacts {
    pub(super) fn new(facts: NodeFacts) -> Self {
        Self { facts: Mutex::new(facts), ..Self::default() }
    }

    /// What the node says now, and a guard that is held until the database has it: so nothing that
    /// was read earlier is stored later.
    pub(super) async fn turn(&self) -> (sync::MutexGuard<'_, ()>, NodeFacts) {
        let guard = self.sending.lock().await;
        (guard, self.facts.lock().clone())
    }
}

/// `Err` names the first difference from a node that uses the ledger now.
pub(super) async fn compare(
    session: &DatabaseSession,
    about: &NodeFacts,
) -> Result<Result<(), String>, Failure> {
    let others = others(session, Uuid::nil()).await?;
    let difference = others.iter().find_map(|other| {
        let prices = || about.price_differences(other).into_iter().next();
        about.plan_difference(other).or_else(prices)
    });
    Ok(difference.map_or(Ok(()), Err))
}

/// Tells the other nodes what this one says of itself now, and returns how its prices differ from
/// theirs.
pub(super) async fn tell(
    session: &DatabaseSession,
    boot: BootId,
    told: &ToldFacts,
) -> Result<Vec<String>, Failure> {
    session.script("begin").await?;
    session.ask(Ask::new(ONE_BY_ONE)).await?;
    let (turn, about) = told.turn().await;
    session.ask(Ask::new(TELL).with(boot.0).with(text(&about))).await?;
    drop(turn);
    let others = others(session, boot.0).await?;
    session.script("commit").await?;
    Ok(others.iter().flat_map(|other| about.price_differences(other)).collect())
}

/// What the nodes that use the ledger now say of themselves, but for this one.
async fn others(session: &DatabaseSession, own: Uuid) -> Result<Vec<NodeFacts>, Failure> {
    let answer = session.ask(Ask::new(OTHERS).with(own)).await?;
    Ok(answer.rows.iter().map(|row| read(row.get(0))).collect())
}

pub(super) async fn list(session: &DatabaseSession) -> Result<Vec<ListedNode>, Failure> {
    let answer = session.ask(Ask::new(ALL)).await?;
    let node = |row: &tokio_postgres::Row| {
        let lease_seconds: f64 = row.get(2);
        let state = match row.get::<_, i16>(1) {
            0 if lease_seconds > 0.0 => ListedNode::RUNNING,
            0 => "silent",
            1 => "ended",
            _ => "stopped",
        };
        let (boot, open_reservations) = (row.get(0), row.get(4));
        ListedNode { boot, state, lease_seconds, open_reservations, facts: read(row.get(3)) }
    };
    Ok(answer.rows.iter().map(node).collect())
}

/// A text that is none of this build's says nothing.
fn read(about: &str) -> NodeFacts {
    serde_json::from_str(about).unwrap_or_default()
}

pub(super) fn text(about: &NodeFacts) -> String {
    serde_json::to_string(about).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Waker};

    /// A renewal that was under way stored the prices from before a change after those.
    #[tokio::test]
    async fn what_was_read_earlier_is_not_sent_later() {
        let told = ToldFacts::new(NodeFacts { machine: "one".into(), ..NodeFacts::default() });
        let (turn, earlier) = told.turn().await;
        told.facts.lock().machine = "two".into();
        let mut next = pin!(told.turn());
        let mut context = Context::from_waker(Waker::noop());
        assert!(next.as_mut().poll(&mut context).is_pending(), "the other is being sent");
        told.facts.lock().machine = "three".into();
        drop(turn);
        let (_turn, later) = next.await;
        assert_eq!((&*earlier.machine, &*later.machine), ("one", "three"));
    }

    #[test]
    fn a_text_of_another_build_says_nothing() {
        assert_eq!(read("no such text"), NodeFacts::default());
    }
}

//! What nodes say of themselves to those that use the same ledger, and what they must agree in.

use super::failure::Failure;
use super::session::{Ask, DatabaseSession};
use cresset_base::ids::BootId;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tokio::sync;
use uuid::Uuid;

const OTHERS: &str = "select about from nodes where state = 0 and boot <> $1";
const TELL: &str = "update nodes set about = $2 where boot = $1";
/// One node at a time tells of itself, so that of two that differ the later one finds it.
pub(super) const ONE_BY_ONE: &str = "select 1 from meta where key = 'format' for update";
const ALL: &str = "select boot, state, extract(epoch from lease_until - clock_timestamp())::float8, \
    about, (select count(*) from reservations r where r.boot = n.boot) from nodes n order by boot";

/// The state of a node that holds its lease.
const RUNNING: &str = "running";

/// What a node says of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// Name of its machine.
    #[serde(default)]
    pub machine: String,
    /// Address at which it accepts clients.
    #[serde(default)]
    pub address: String,
    /// Address at which it takes requests that other nodes pass on; empty where it takes none.
    #[serde(default)]
    pub cluster: String,
    /// Names of the models that it serves now, by id.
    #[serde(default)]
    pub models: BTreeMap<Uuid, String>,
    /// Version and build of its program.
    #[serde(default)]
    pub build: String,
    /// Each plan as text: an account must have the same limits everywhere.
    #[serde(default)]
    pub plans: BTreeMap<String, String>,
    /// The prices of each release that it serves, by the release's id: nodes charge alike.
    #[serde(default)]
    pub prices: BTreeMap<String, ReleasePrices>,
}

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

/// What a release costs at a node, microcredits for a million tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReleasePrices {
    /// Its name there.
    pub name: String,
    pub input: u64,
    pub cached_input: u64,
    pub output: u64,
}

impl ReleasePrices {
    fn is_dearer_or_cheaper(&self, other: &Self) -> bool {
        [self.input, self.cached_input, self.output]
            != [other.input, other.cached_input, other.output]
    }

    /// The flags of the command that sets these prices.
    fn flags(&self) -> String {
        let Self { input, cached_input, output, .. } = self;
        format!("--input {input} --cached-input {cached_input} --output {output}")
    }
}

/// A node in the ledger's table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ListedNode {
    pub boot: Uuid,
    /// `running`, `silent` (its lease has run out), `ended` (declared so by another), `stopped`.
    pub state: &'static str,
    /// Seconds until its lease runs out; negative after that.
    pub lease_seconds: f64,
    /// Requests that it runs.
    pub open_reservations: i64,
    #[serde(flatten)]
    pub facts: NodeFacts,
}

impl ListedNode {
    pub fn is_running(&self) -> bool {
        self.state == RUNNING
    }
}

/// `Err` names the first difference from a node that uses the ledger now.
pub(super) async fn compare(
    session: &DatabaseSession,
    about: &NodeFacts,
) -> Result<Result<(), String>, Failure> {
    let others = others(session, Uuid::nil()).await?;
    let difference = others.iter().find_map(|other| {
        plan_difference(about, other).or_else(|| price_differences(about, other).into_iter().next())
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
    Ok(others.iter().flat_map(|other| price_differences(&about, other)).collect())
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
            0 if lease_seconds > 0.0 => RUNNING,
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

/// The releases that both serve at different prices.
fn price_differences(own: &NodeFacts, other: &NodeFacts) -> Vec<String> {
    let both = own.prices.iter().filter_map(|(id, own)| Some((own, other.prices.get(id)?)));
    let differing = both.filter(|(own, there)| own.is_dearer_or_cheaper(there));
    let say = |(here, there): (&ReleasePrices, &ReleasePrices)| {
        format!(
            "the prices of {} differ from those of the node at {} on {}, which uses the same ledger; give \
             `cresset models price {} {}` here, or `cresset models price {} {}` there",
            here.name,
            other.address,
            other.machine,
            here.name,
            there.flags(),
            there.name,
            here.flags()
        )
    };
    differing.map(say).collect()
}

fn plan_difference(own: &NodeFacts, other: &NodeFacts) -> Option<String> {
    // A node that says nothing of its plans can be compared in nothing.
    if own.plans.is_empty() || other.plans.is_empty() {
        return None;
    }
    let names = own.plans.keys().chain(other.plans.keys());
    let name = names.into_iter().find(|name| own.plans.get(*name) != other.plans.get(*name))?;
    let said = |facts: &NodeFacts| facts.plans.get(name).cloned().unwrap_or("nothing".into());
    Some(format!(
        "the plan {name:?} differs from that of the node at {} on {}, which uses the same ledger: \
         here it is {}, there {}; make [plans.{name}] equal",
        other.address,
        other.machine,
        said(own),
        said(other)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Waker};

    fn facts(plans: &[(&str, &str)]) -> NodeFacts {
        let plans = plans.iter().map(|(name, text)| ((*name).into(), (*text).into())).collect();
        NodeFacts { plans, address: "a:1".into(), ..NodeFacts::default() }
    }

    #[test]
    fn plans_must_be_equal_by_name() {
        let own = facts(&[("default", "1"), ("gold", "2")]);
        for (other, named) in [
            (own.clone(), None),
            (facts(&[]), None),
            (facts(&[("default", "1"), ("gold", "3")]), Some("\"gold\"")),
            (facts(&[("default", "1")]), Some("\"gold\"")),
            (facts(&[("default", "1"), ("gold", "2"), ("new", "1")]), Some("\"new\"")),
        ] {
            let found = plan_difference(&own, &other);
            assert_eq!(found.is_some(), named.is_some(), "{found:?}");
            assert!(found.unwrap_or_default().contains(named.unwrap_or_default()));
        }
        assert_eq!(read("no such text"), NodeFacts::default());
    }

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
    fn prices_of_releases_that_both_serve_must_be_equal() {
        let priced = |name: &str, output| ReleasePrices {
            name: name.into(),
            input: 1,
            cached_input: 0,
            output,
        };
        let node = |prices: &[(&str, &str, u64)]| NodeFacts {
            prices: prices
                .iter()
                .map(|(id, name, output)| ((*id).into(), priced(name, *output)))
                .collect(),
            ..facts(&[])
        };
        let own = node(&[("1", "one", 4), ("2", "two", 5)]);
        for (other, named) in [
            (node(&[]), None),
            (node(&[("1", "other name", 4), ("3", "two", 9)]), None),
            (
                node(&[("1", "uno", 4), ("2", "due", 6)]),
                Some(
                    "price two --input 1 --cached-input 0 --output 6` here, or \
                `cresset models price due --input 1 --cached-input 0 --output 5` there",
                ),
            ),
        ] {
            let found = price_differences(&own, &other).concat();
            assert_eq!(found.is_empty(), named.is_none(), "{found}");
            assert!(found.contains(named.unwrap_or_default()), "{found}");
        }
    }
}

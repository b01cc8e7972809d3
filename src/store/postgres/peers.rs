//! What nodes say of themselves to those that use the same ledger, and what they must agree in.

use super::failure::Failure;
use super::session::{Ask, DatabaseSession};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use uuid::Uuid;

const OTHERS: &str = "select about from nodes where state = 0";
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
    about: &str,
) -> Result<Result<(), String>, Failure> {
    let own = read(about);
    let others = session.ask(Ask::new(OTHERS)).await?;
    let difference = others.rows.iter().find_map(|row| difference(&own, &read(row.get(0))));
    Ok(difference.map_or(Ok(()), Err))
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

fn difference(own: &NodeFacts, other: &NodeFacts) -> Option<String> {
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
            let found = difference(&own, &other);
            assert_eq!(found.is_some(), named.is_some(), "{found:?}");
            assert!(found.unwrap_or_default().contains(named.unwrap_or_default()));
        }
        assert_eq!(read("no such text"), NodeFacts::default());
    }
}

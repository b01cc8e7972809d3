//! What nodes that share a ledger say of themselves, and what they must agree in.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use uuid::Uuid;

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

impl NodeFacts {
    /// The first plan that differs, in a sentence.
    pub fn plan_difference(&self, other: &Self) -> Option<String> {
        // A node that says nothing of its plans can be compared in nothing.
        if self.plans.is_empty() || other.plans.is_empty() {
            return None;
        }
        let names = self.plans.keys().chain(other.plans.keys());
        let name =
            names.into_iter().find(|name| self.plans.get(*name) != other.plans.get(*name))?;
        let said = |facts: &Self| facts.plans.get(name).cloned().unwrap_or("nothing".into());
        Some(format!(
            "the plan {name:?} differs from that of the node at {} on {}, which uses the same \
             ledger: here it is {}, there {}; make [plans.{name}] equal",
            other.address,
            other.machine,
            said(self),
            said(other)
        ))
    }

    /// How the prices of releases that both serve differ, one sentence for each release.
    pub fn price_differences(&self, other: &Self) -> Vec<String> {
        let both = self.prices.iter().filter_map(|(id, own)| Some((own, other.prices.get(id)?)));
        let differing = both.filter(|(own, there)| own.is_dearer_or_cheaper(there));
        let say = |(here, there): (&ReleasePrices, &ReleasePrices)| {
            format!(
                "the prices of {} differ from those of the node at {} on {}, which uses the same \
                 ledger; give `cresset models price {} {}` here, or `cresset models price {} {}` \
                 there",
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
    /// The state of a node that holds its lease.
    pub const RUNNING: &str = "running";

    pub fn is_running(&self) -> bool {
        self.state == Self::RUNNING
    }
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
            let found = own.plan_difference(&other);
            assert_eq!(found.is_some(), named.is_some(), "{found:?}");
            assert!(found.unwrap_or_default().contains(named.unwrap_or_default()));
        }
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
            let found = own.price_differences(&other).concat();
            assert_eq!(found.is_empty(), named.is_none(), "{found}");
            assert!(found.contains(named.unwrap_or_default()), "{found}");
        }
    }
}

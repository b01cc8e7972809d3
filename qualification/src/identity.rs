//! The identity that a verdict is about: the release's digests, the engine's build, the hardware
//! and the serving settings. A verdict holds for exactly this tuple. When a part changes, the
//! release has to be qualified again.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub release: Release,
    pub host: HostIdentity,
}

/// The identity of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    pub name: String,
    pub release_id: Uuid,
    pub origin: Origin,
    /// File name → hex SHA-256, which publishers state.
    pub files: BTreeMap<String, String>,
    /// File name → hex BLAKE3 of the same bytes, which every load compares. Empty where the files
    /// were not read; no part of the comparison of identities.
    #[serde(default)]
    pub blake3: BTreeMap<String, String>,
    /// The manifest's limits, sampling defaults, publisher and licence.
    pub terms: Value,
}

/// The party that vouches for a release. Published releases must pass against an independent
/// reference; those that an operator added have none, and the verdict says that it rests on
/// self-consistency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    Published,
    Operator,
}

/// The identity of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostIdentity {
    pub engine: EngineBuild,
    pub hardware: Hardware,
    pub settings: ServingSettings,
    /// The algorithm that a device's library computes each shape of product with. They were
    /// measured, and another choice rounds differently, so whoever loads the model applies them.
    /// None while nothing is loaded. Before policy 11 they were digests.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub products: BTreeSet<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineBuild {
    pub version: String,
    /// Hex SHA-256 of the lock file: every dependency's version.
    pub lockfile_sha256: String,
    /// Hex SHA-256 of the running executable.
    pub executable_sha256: String,
}

/// A class of devices: another unit of the same kind has the same value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hardware {
    /// `cpu` or `cuda`.
    pub kind: String,
    pub vendor: String,
    pub model: String,
    /// Instruction sets of a CPU that the kernels choose between; architecture, memory, driver and
    /// libraries of a GPU.
    pub features: Vec<String>,
    /// Compute threads on a CPU; multiprocessors of a GPU.
    pub threads: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServingSettings {
    /// Type of the activations, such as `bf16`.
    pub dtype: String,
    pub kv_dtype: String,
    pub dequantise: bool,
    /// The forms in which a device keeps weights; empty on the CPU, which keeps those of the files.
    #[serde(default)]
    pub weights: String,
    /// Vector instructions of the CPU's kernels; empty on a device.
    #[serde(default)]
    pub instruction_set: String,
    pub block_size: usize,
    pub max_batched_tokens: usize,
    pub max_rows: usize,
    /// Longest prompt + output served, tokens; 0 is the model's own limit.
    pub max_context: usize,
    /// MiB of each model's KV cache on the CPU; 0 on a device, which uses what is free.
    pub kv_mib: usize,
    /// Most rows of a decoding step that is recorded as a graph; 0 on the CPU.
    pub gpu_graph_rows: usize,
    /// GPUs that compute a model together; 0 on the CPU.
    #[serde(default)]
    pub tensor_parallel: usize,
}

/// The first part in which two identities differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub part: &'static str,
    pub recorded: String,
    pub present: String,
}

impl Identity {
    /// `None` when a verdict about `self` holds for `present` too.
    pub fn difference(&self, present: &Self) -> Option<Difference> {
        let (old, new) = (&self.host, &present.host);
        differ("release", &self.release.release_id, &present.release.release_id)
            .or_else(|| differ("release files", &self.release.files, &present.release.files))
            .or_else(|| differ("release terms", &self.release.terms, &present.release.terms))
            .or_else(|| differ("release origin", &self.release.origin, &present.release.origin))
            .or_else(|| differ("engine version", &old.engine.version, &new.engine.version))
            .or_else(|| {
                differ("dependencies", &old.engine.lockfile_sha256, &new.engine.lockfile_sha256)
            })
            .or_else(|| {
                differ("executable", &old.engine.executable_sha256, &new.engine.executable_sha256)
            })
            .or_else(|| differ("hardware", &old.hardware, &new.hardware))
            .or_else(|| differ("serving setting", &old.settings, &new.settings))
            .or_else(|| lost_products(&old.products, &new.products))
    }
}

/// A host without any takes those that are recorded.
fn lost_products(recorded: &BTreeSet<String>, present: &BTreeSet<String>) -> Option<Difference> {
    let kept = recorded.intersection(present).count();
    (kept < recorded.len() && !present.is_empty()).then(|| Difference {
        part: "choice of algorithms for products",
        recorded: format!("{} shapes", recorded.len()),
        present: format!("the same for {kept} of them"),
    })
}

fn differ<T: PartialEq + Serialize>(
    part: &'static str,
    recorded: &T,
    present: &T,
) -> Option<Difference> {
    let json = |value: &T| {
        serde_json::to_value(value).expect("invariant: an identity has only string keys")
    };
    let (old, new) = (json(recorded), json(present));
    (recorded != present).then(|| Difference {
        part,
        recorded: apart(&old, &new),
        present: apart(&new, &old),
    })
}

/// A value as text for people. For an object, only the members that differ from `other` are shown.
fn apart(value: &Value, other: &Value) -> String {
    match value {
        Value::Object(members) => {
            let differ = members.iter().filter(|(name, value)| other.get(name) != Some(value));
            differ.map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use crate::record::Verdict;
    use crate::testing::records;

    #[test]
    fn a_verdict_needs_the_algorithms_it_was_made_with_and_brings_them_to_a_host_without() {
        let with = |products: &[&str]| {
            let mut identity = records::of(Verdict::Qualified).identity;
            identity.host.products = products.iter().map(|p| (*p).to_owned()).collect();
            identity
        };
        let recorded = with(&["a", "b"]);
        for fitting in [&["a", "b", "c"][..], &[]] {
            assert_eq!(recorded.difference(&with(fitting)), None);
        }
        let lost = recorded.difference(&with(&["a", "c"])).unwrap();
        assert_eq!(lost.present, "the same for 1 of them");
    }
}

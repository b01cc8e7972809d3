//! The thresholds of the checks, from `policy.toml`: each with its reason and the run that it came
//! from.

use serde::Deserialize;
use std::sync::LazyLock;

const TEXT: &str = include_str!("../policy.toml");

/// The version of the checks and thresholds.
pub(crate) const VERSION: u32 = version(TEXT.as_bytes());

/// Reads the first `version = NUMBER` at the beginning of a line.
const fn version(text: &[u8]) -> u32 {
    const KEY: &[u8] = b"\nversion = ";
    let (mut at, mut matched, mut found) = (0, 0, 0);
    while matched < KEY.len() {
        matched = if text[at] == KEY[matched] { matched + 1 } else { (text[at] == b'\n') as usize };
        at += 1;
    }
    while text[at].is_ascii_digit() {
        found = found * 10 + (text[at] - b'0') as u32;
        at += 1;
    }
    found
}

#[derive(Debug, Deserialize)]
pub(crate) struct Policy {
    pub weights: WeightBounds,
    pub kernels: KernelBounds,
    pub language: LanguageBounds,
    pub witness: WitnessTiers,
    pub like: LikeBounds,
    pub margin: MarginBounds,
    pub soak: SoakBounds,
    pub tools: ToolBounds,
}

/// A number that a check compares with.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Threshold {
    pub value: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolBounds {
    pub call_tokens: Threshold,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WeightBounds {
    pub scale: Threshold,
    pub peak: Threshold,
    pub bias: Threshold,
    pub crest: Threshold,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KernelBounds {
    pub most: Threshold,
    pub relative: Threshold,
    pub rounded: Threshold,
    pub bytes: Threshold,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LanguageBounds {
    pub parameters: Threshold,
    pub prose: Threshold,
    pub code: Threshold,
    pub german: Threshold,
    pub dialogue: Threshold,
    pub table: Threshold,
    pub maths: Threshold,
    pub decade: Threshold,
    pub room: Threshold,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LikeBounds {
    pub mean_kl: Threshold,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MarginBounds {
    pub exact: Threshold,
    pub stored: Threshold,
    pub bytes: Threshold,
    pub bf16: Threshold,
    pub foreign: Threshold,
    pub like: Threshold,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SoakBounds {
    pub leak: Threshold,
    /// The widest interval of a slope that proves anything.
    pub width: Threshold,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WitnessTiers {
    pub exact: PrecisionBounds,
    pub stored: PrecisionBounds,
    pub bytes: PrecisionBounds,
    pub bf16: PrecisionBounds,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PrecisionBounds {
    pub mean_kl: Threshold,
    pub p999: Threshold,
    pub most: Threshold,
}

static POLICY: LazyLock<Policy> =
    LazyLock::new(|| toml::from_str(TEXT).expect("invariant: the embedded policy is valid"));

pub(crate) fn policy() -> &'static Policy {
    &POLICY
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};
    use toml::{Table, Value};

    /// The digest of the values of each version. A line that stands here is never changed.
    const VERSIONS: &[(u32, &str)] = &[
        (4, "b5b599a11cb569009a1424422b96aa6afd185504f78fb91b2458a0dc9a74137e"),
        (5, "b5b599a11cb569009a1424422b96aa6afd185504f78fb91b2458a0dc9a74137e"),
        (6, "85e0c03dde7047ba187e770c1ff69afb44b8ccb38382d68f0dc063f56f986154"),
        (7, "b3056c40d643c35cc0d4ee410c3c221eef5a6a40afe1b02c0439ddf2bc1b992e"),
        (8, "d6940f1f452848df03fa299bc4ce2db1654b136636ce24b3642dd5d1cb5de9d0"),
        (9, "c1fc6b01f484635d3bc4f5c8f6b2ca0422536706fcbb49109795a5c271a832bf"),
        (10, "f9984af3cdb6e2030a08ef1ff5f981bd51889a3f6e1e0e30a23efc99e84c6cfb"),
        // The same values: records hold the algorithms of products, where they had digests.
        (11, "f9984af3cdb6e2030a08ef1ff5f981bd51889a3f6e1e0e30a23efc99e84c6cfb"),
    ];

    /// Every threshold, by its name with those of the tables around it.
    fn thresholds(name: &str, table: &Table, found: &mut Vec<(String, Table)>) {
        for (key, value) in table {
            let name = format!("{name}.{key}");
            match value {
                Value::Table(inner) if inner.contains_key("value") => {
                    found.push((name, inner.clone()));
                }
                Value::Table(inner) => thresholds(&name, inner, found),
                other => assert_eq!((name.as_str(), other.is_integer()), (".version", true)),
            }
        }
    }

    #[test]
    fn another_value_needs_another_version() {
        let table: Table = TEXT.parse().unwrap();
        assert_eq!(table["version"].as_integer(), Some(VERSION.into()));
        let mut found = Vec::new();
        thresholds("", &table, &mut found);
        let line = |(name, table): &(String, Table)| format!("{name} = {}\n", table["value"]);
        let text = found.iter().map(line).collect::<Vec<_>>().concat();
        let digest = hex::encode(Sha256::digest(&text));
        let known = VERSIONS.iter().find(|(version, _)| *version == VERSION);
        assert_eq!(known.map(|(_, digest)| *digest), Some(digest.as_str()), "{text}");
    }

    #[test]
    fn each_threshold_says_why_it_is_what_it_is() {
        let mut found = Vec::new();
        thresholds("", &TEXT.parse().unwrap(), &mut found);
        for (name, table) in found {
            for key in ["reason", "run"] {
                let said = table.get(key).and_then(Value::as_str).unwrap_or_default();
                assert!(said.len() > 20, "{name} has no {key}");
            }
        }
    }
}

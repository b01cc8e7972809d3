//! The manifest of a release: identity, files with digests, limits, prices and sources.

use super::{Error, Result, sampling_defaults};
use cresset_base::ModelId;
use cresset_kernels::sampling::params::SamplingParams;
use cresset_ledger::Prices;
use cresset_qualification::Origin;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use uuid::Uuid;

/// The name of a release's manifest in its folder.
pub(super) const MANIFEST: &str = "manifest.toml";

/// The releases that come with the node; the first is the default.
const BUILT_IN: &[(&str, &str)] = &[
    (
        "models/releases/smollm2-135m-instruct.toml",
        include_str!("../../models/releases/smollm2-135m-instruct.toml"),
    ),
    (
        "models/releases/qwen2.5-coder-1.5b-instruct.toml",
        include_str!("../../models/releases/qwen2.5-coder-1.5b-instruct.toml"),
    ),
];

/// `models/releases/*.toml`, built in, or written by `models add` / `models pull` into the data
/// folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub id: ModelId,
    /// Short name for the command line ("smollm2-135m-instruct").
    pub name: String,
    /// Public address shown to clients, if any.
    pub address: Option<String>,
    pub publisher: String,
    pub upstream: Upstream,
    pub release_id: Uuid,
    pub release_label: String,
    /// Unix seconds.
    pub created: u64,
    pub files: Vec<ReleaseFile>,
    pub limits: ManifestLimits,
    /// Sampling parameters of a request that does not set them.
    #[serde(with = "sampling_defaults")]
    pub generation: SamplingParams,
    pub prices: Prices,
    #[serde(default)]
    pub sources: Vec<Source>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upstream {
    pub name: String,
    pub url: Option<String>,
    pub revision: Option<String>,
    /// SPDX identifier.
    pub license: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseFile {
    /// File name inside the release's folder.
    pub name: String,
    /// Hex SHA-256.
    pub sha256: String,
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestLimits {
    /// Absolute limit of the model, tokens.
    pub model_context_tokens: u32,
    pub max_output_tokens: u32,
}

/// A place from which files can come. Sources are tried in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Source {
    /// A folder that holds the files under their names, or the one file itself. Relative to the
    /// data folder.
    Local { path: PathBuf },
    /// `files` maps release file names to paths in the repository.
    Hub { repo: String, revision: String, files: BTreeMap<String, String> },
    /// `files` maps release file names to paths inside the wheel.
    PythonPackage { package: String, version: String, files: BTreeMap<String, String> },
    /// Files in parts, spread over packages of one version: `files` maps each to the paths of its
    /// parts, in order.
    PythonPackages { packages: Vec<String>, version: String, files: BTreeMap<String, Vec<String>> },
}

impl Manifest {
    /// The releases that come with the node.
    pub fn built_in() -> Vec<Self> {
        let parse = |(origin, text): &(&str, &str)| {
            Self::parse(text, origin).expect("built-in manifests are valid")
        };
        BUILT_IN.iter().map(parse).collect()
    }

    /// The release that `quickstart` fetches.
    pub fn default_release() -> Self {
        Self::built_in().remove(0)
    }

    /// The promises of the release beside its files. A verdict holds for these terms alone.
    pub fn terms(&self) -> Value {
        let mut all = serde_json::to_value(self).expect("a manifest is representable in JSON");
        let terms = ["publisher", "limits", "generation"].map(|name| all[name].take());
        let [publisher, limits, generation] = terms;
        let license = &self.upstream.license;
        json!({
            "publisher": publisher,
            "license": license,
            "limits": limits,
            "generation": generation,
        })
    }

    /// `origin` names the text in errors.
    pub fn parse(text: &str, origin: &str) -> Result<Self> {
        let refuse = |why: String| Error::BadManifest { origin: origin.to_owned(), why };
        let manifest: Self = toml::from_str(text).map_err(|error| refuse(error.to_string()))?;
        manifest.validate().map_err(refuse)?;
        Ok(manifest)
    }

    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a manifest is representable in TOML")
    }

    /// The party that vouches for the release. A release is published when it is exactly one that
    /// comes with the node.
    pub fn origin(&self) -> Origin {
        let same = |other: &Self| other.release_id == self.release_id && other.files == self.files;
        if Self::built_in().iter().any(same) { Origin::Published } else { Origin::Operator }
    }

    /// Whether it comes with the node. Of another one, publisher and upstream are what its file or
    /// its operator claims.
    pub fn is_published(&self) -> bool {
        self.origin() == Origin::Published
    }

    pub fn digests(&self) -> BTreeMap<String, String> {
        self.files.iter().map(|file| (file.name.clone(), file.sha256.clone())).collect()
    }

    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    fn validate(&self) -> Result<(), String> {
        check_name(&self.name)?;
        ensure(!self.id.0.is_nil() && !self.release_id.is_nil(), || {
            "id and release_id must not be nil".into()
        })?;
        ensure(!self.publisher.is_empty() && !self.upstream.license.is_empty(), || {
            "publisher and upstream.license must be given".into()
        })?;
        self.validate_files()?;
        self.validate_limits()?;
        self.sources.iter().try_for_each(|source| self.validate_source(source))
    }

    fn validate_files(&self) -> Result<(), String> {
        ensure(!self.files.is_empty(), || "files must not be empty".into())?;
        ensure(self.digests().len() == self.files.len(), || "two files have the same name".into())?;
        for file in &self.files {
            let name = &file.name;
            ensure(is_plain(name), || format!("files: {name:?} must be a plain file name"))?;
            let hex = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
            let digest = file.sha256.len() == 64 && file.sha256.bytes().all(hex);
            ensure(digest, || format!("files: sha256 of {name} must be 64 lower-case hex digits"))?;
            ensure(file.bytes > 0, || format!("files: bytes of {name} must be above 0"))?;
        }
        Ok(())
    }

    fn validate_limits(&self) -> Result<(), String> {
        let ManifestLimits { model_context_tokens: context, max_output_tokens: output } =
            self.limits;
        ensure(output > 0 && output <= context, || {
            format!(
                "limits: 0 < max_output_tokens ({output}) <= model_context_tokens ({context}) must hold"
            )
        })
    }

    fn validate_source(&self, source: &Source) -> Result<(), String> {
        let has = |name: &String| match source {
            Source::Local { .. } => true,
            Source::Hub { files, .. } | Source::PythonPackage { files, .. } => {
                files.contains_key(name)
            }
            Source::PythonPackages { files, .. } => {
                files.get(name).is_some_and(|parts| !parts.is_empty())
            }
        };
        let missing = self.files.iter().find(|file| !has(&file.name));
        missing.map_or(Ok(()), |file| {
            Err(format!("sources: {source} does not say where {} is", file.name))
        })
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Local { path } => write!(f, "local path {}", path.display()),
            Self::Hub { repo, revision, .. } => write!(f, "hub repository {repo}@{revision}"),
            Self::PythonPackage { package, version, .. } => {
                write!(f, "Python package {package}=={version}")
            }
            Self::PythonPackages { packages, version, .. } => {
                write!(f, "Python packages {} (version {version})", packages.join(", "))
            }
        }
    }
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why()) }
}

/// Names become folder names and command-line arguments.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    let allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"-._".contains(&c);
    let first = name.bytes().next().is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    ensure(first && name.len() <= 96 && name.bytes().all(allowed), || {
        format!(
            "the name {name:?} must be lower-case letters, digits, '-', '.' and '_', at most 96, the first a letter or digit"
        )
    })
}

/// Whether a name stays inside the release's folder: it has no separators and is no parent folder.
/// Hidden names belong to the catalogue, so they are refused too.
fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('.')
        && !name.contains(['/', '\\', '\0'])
        && name != MANIFEST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_releases_survive_being_written() {
        for manifest in Manifest::built_in() {
            assert_eq!(manifest.origin(), Origin::Published);
            assert_eq!(Manifest::parse(&manifest.to_toml(), "written").unwrap(), manifest);
        }
    }

    #[test]
    fn the_default_release_has_three_sources() {
        let manifest = Manifest::default_release();
        assert_eq!(manifest.bytes(), 98_362_432);
        let kinds: Vec<String> = manifest.sources.iter().map(ToString::to_string).collect();
        assert!(
            kinds[0].starts_with("local")
                && kinds[1].starts_with("hub")
                && kinds[2].starts_with("Python")
        );
    }

    #[test]
    fn a_changed_digest_is_no_longer_the_published_release() {
        let mut manifest = Manifest::default_release();
        manifest.files[0].sha256 = "0".repeat(64);
        assert_eq!(manifest.origin(), Origin::Operator);
    }

    fn check(change: impl FnOnce(&mut Manifest), expect: &str) {
        let mut manifest = Manifest::default_release();
        change(&mut manifest);
        let error = Manifest::parse(&manifest.to_toml(), "release.toml").unwrap_err().to_string();
        assert!(error.contains(expect) && error.contains("release.toml"), "{error}");
    }

    #[test]
    fn bad_manifests_are_refused_with_the_reason() {
        check(|m| m.name = "../up".into(), "the name");
        check(|m| m.name = String::new(), "the name");
        check(|m| m.id.0 = Uuid::nil(), "nil");
        check(|m| m.upstream.license.clear(), "license");
        check(|m| m.files.clear(), "files must not be empty");
        check(|m| m.files.push(m.files[0].clone()), "same name");
        check(|m| m.files[0].name = "../x".into(), "plain file name");
        check(|m| m.files[0].name = ".hidden".into(), "plain file name");
        check(|m| m.files[0].name = "manifest.toml".into(), "plain file name");
        check(|m| m.files[0].sha256 = "ABC".into(), "64 lower-case hex");
        check(|m| m.files[0].bytes = 0, "above 0");
        check(|m| m.limits.max_output_tokens = 9000, "limits");
        check(|m| m.limits.max_output_tokens = 0, "limits");
        check(|m| m.generation.temperature = 2.5, "generation.temperature");
        check(|m| m.generation.top_p = 0.0, "generation.top_p");
        check(|m| m.files[0].name = "other.gguf".into(), "does not say where other.gguf is");
    }

    #[test]
    fn unknown_keys_are_refused_with_their_line() {
        let text = Manifest::default_release().to_toml().replace("publisher", "publishers");
        let error = Manifest::parse(&text, "x").unwrap_err().to_string();
        assert!(error.contains("publishers") && error.contains("line"), "{error}");
    }
}

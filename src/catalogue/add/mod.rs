//! Adds new releases: from a path on this machine or from a hub repository that has no manifest
//! yet. Digests are computed here and pinned. Ids follow from the digests, so the same files get
//! the same ids on every node.

mod files;
mod hub;
mod local;
mod metadata;
#[cfg(test)]
mod tests;

use super::folder::{ReleaseFolder, is_gguf};
use super::manifest::check_name;
use super::{Catalogue, Error, Manifest, ManifestLimits, ReleaseFile, Result, Source, Upstream};
use cresset_base::ModelId;
use cresset_ledger::Prices;
use cresset_models::loader::gguf::ShardName;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// The SPDX identifier for a licence that is not stated.
const NO_LICENSE: &str = "NOASSERTION";
/// Output limit of releases whose files state none, tokens.
const MAX_OUTPUT: u32 = 4096;
/// Prices of releases that an operator adds, microcredits per million tokens. The operator edits
/// the manifest to change them.
const PRICES: Prices =
    Prices { revision: 1, input: 100_000, cached_input: 25_000, output: 400_000 };

/// The parts of a manifest that are known before the files are hashed.
struct Draft {
    name: String,
    publisher: String,
    upstream: Upstream,
    sources: Vec<Source>,
}

impl Catalogue {
    /// Puts each file to its place by `place`. The manifest is written last: a folder without one
    /// is no release.
    fn install(
        &self,
        manifest: &Manifest,
        files: &[PathBuf],
        place: fn(&Path, &ReleaseFolder, &str) -> Result<()>,
    ) -> Result<()> {
        let taken = |other: &Manifest| other.name == manifest.name && other.files != manifest.files;
        if self.manifests()?.iter().any(taken) {
            return Err(Error::NameTaken(manifest.name.clone()));
        }
        let folder = self.folder(&manifest.name);
        let _working = folder.lock()?;
        for (file, from) in manifest.files.iter().zip(files) {
            place(from, &folder, &file.name)?;
        }
        folder.verify(manifest)?;
        folder.write_manifest(manifest)
    }
}

impl Draft {
    fn manifest(self, files: &[PathBuf], digested: Vec<ReleaseFile>) -> Result<Manifest> {
        check_name(&self.name).map_err(|why| Error::NotAModel {
            path: files[0].clone(),
            why: format!("{why}; use --name"),
        })?;
        let context = metadata::context_tokens(files)?;
        Ok(Manifest {
            id: ModelId(content_id("model", &self.name, &digested)),
            release_id: content_id("release", &self.name, &digested),
            release_label: self.name.clone(),
            name: self.name,
            address: None,
            publisher: self.publisher,
            upstream: self.upstream,
            created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            files: digested,
            limits: ManifestLimits {
                model_context_tokens: context,
                max_output_tokens: MAX_OUTPUT.min(context),
            },
            generation: metadata::generation_defaults(files),
            prices: PRICES,
            sources: self.sources,
        })
    }
}

/// A UUID of version 8 from the SHA-256 of the parts.
fn content_id(kind: &str, name: &str, files: &[ReleaseFile]) -> Uuid {
    let mut hasher = Sha256::new();
    hasher.update(format!("cresset {kind}\n{name}\n"));
    for file in files {
        hasher.update(format!("{} {}\n", file.sha256, file.name));
    }
    let digest: [u8; 32] = hasher.finalize().into();
    let (first, _) = digest.split_first_chunk::<16>().expect("SHA-256 has 32 bytes");
    uuid::Builder::from_custom_bytes(*first).into_uuid()
}

/// Makes a name from a path or repository: lower case, with one dash for each run of other
/// characters.
fn slug(text: &str) -> String {
    let last = text.rsplit('/').next().unwrap_or(text).to_ascii_lowercase();
    let words = last.split(|c: char| !(c.is_ascii_alphanumeric() || "._".contains(c)));
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-")
}

/// The name of a GGUF file without its ending, and of a shard without its number.
fn stem(name: &str) -> Option<&str> {
    match ShardName::parse(name) {
        Some(shard) => Some(shard.stem),
        None if is_gguf(name) => Path::new(name).file_stem()?.to_str(),
        None => None,
    }
}

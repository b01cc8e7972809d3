//! Releases: manifests, fetching with digests, qualification records. Only a `QualifiedModel` can
//! be served.
//!
//! In the data folder: `models/NAME/` holds a release's files, its `manifest.toml` and the prices
//! that it has had; `qualification/NAME/` its records.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod acceptance;
mod add;
mod context;
mod fetch;
mod file_facts;
mod folder;
mod goldens;
mod host_identity;
mod manifest;
mod node_key;
mod price_history;
mod products;
mod qualified;
mod receipts;
mod records;
mod sampling_defaults;
mod settings;
mod signed_files;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod unfinished;

pub use acceptance::Acceptance;
pub use context::{FailedContext, ProvenContext};
pub use fetch::{FetchOptions, FetchPhase, FetchProgress};
pub use file_facts::FileFacts;
pub use folder::{FileDigests, FileStamp};
pub use host_identity::describe_host;
pub use manifest::{Manifest, ManifestLimits, ReleaseFile, Source, Upstream};
pub use node_key::{NODE_KEY, NODE_KEYS};
pub use price_history::{NotedPrices, PRICE_HISTORY};
pub use qualified::{DoorRules, Evidence, NotQualified, ProvenCalls, QualifiedModel};
pub use receipts::{NodePublicKey, ReceiptSigner, claimed};
pub use settings::HubSettings;

use cresset_base::{DiskReserve, NoSpace, UnixMillis};
use cresset_models::ModelSource;
use cresset_qualification::{HostIdentity, Identity, Record, Release};
use folder::ReleaseFolder;
use records::StoredRecord;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "no release is called {name:?}. Known are: {known}. `cresset models pull OWNER/REPOSITORY` fetches others from the hub"
    )]
    Unknown { name: String, known: String },
    #[error("{origin}: {why}")]
    BadManifest { origin: String, why: String },
    #[error(
        "the release {name} is passed over, because its manifest cannot be read ({why}). \
         `cresset models remove {name}` removes it; then pull or add it again"
    )]
    BadRelease { name: String, why: String },
    #[error("the files of {name} are not here: run `cresset models pull {name}`")]
    NotPulled { name: String },
    #[error(
        "{path} is damaged or not what its manifest says (SHA-256 {found}, expected {expected}). \
         Nothing of it is used: run `cresset models pull {name}` to fetch it again"
    )]
    WrongDigest { name: String, path: PathBuf, found: String, expected: String },
    #[error(
        "{path} is damaged or not what its manifest says ({found} bytes, expected {expected}). \
         Nothing of it is used: run `cresset models pull {name}` to fetch it again"
    )]
    WrongSize { name: String, path: PathBuf, found: u64, expected: u64 },
    #[error("could not fetch {name}; each source was tried:{account}")]
    NoSource { name: String, account: String },
    #[error(
        "{name} has more than {mib} MiB: raise hub.max_download_mib if that is right, or name one \
         of its files"
    )]
    TooLarge { name: String, mib: u64 },
    #[error("no release is called {name:?}: {hint}")]
    Misspelt { name: String, hint: String },
    #[error("the disk is full at {path}: free some space there, or choose another --data-dir")]
    DiskFull { path: PathBuf },
    #[error(transparent)]
    NoSpace(#[from] NoSpace),
    #[error(
        "{path} is no key: it holds 64 hex digits. Put the original back, or remove it and qualify \
         every model again"
    )]
    BadNodeKey { path: PathBuf },
    #[error(
        "{path} is no list of public keys: it holds 64 hex digits on each line. Put the original \
         back, or remove it: receipts of keys that were replaced then count for nothing here"
    )]
    BadKeyList { path: PathBuf },
    #[error("{path}: {why}")]
    NotAModel { path: PathBuf, why: String },
    #[error("{path} cannot be used as goldens: {why}")]
    BadGoldens { path: PathBuf, why: String },
    #[error(
        "there are no goldens of {release:?}. Known are those of: {known}. `cresset goldens import \
         FILE` adds others"
    )]
    NoGoldens { release: String, known: String },
    #[error("{0}. Nothing was added")]
    CannotRun(String),
    #[error("{0}")]
    Unreadable(String),
    #[error("the name {0:?} is taken by another release: choose one with --name")]
    NameTaken(String),
    #[error("another process is working on {0}: wait until it is done")]
    Busy(String),
    #[error("could not {doing} {path}: {source}")]
    Io { doing: &'static str, path: PathBuf, source: std::io::Error },
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Makes an error of the file system into one of ours, for `map_err`. `doing` is a verb such as
    /// `read`.
    fn io(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| match source.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                Self::DiskFull { path: path.to_owned() }
            }
            _ => Self::Io { doing, path: path.to_owned(), source },
        }
    }
}

/// Says why a node cannot run a model, from its files' headers, before they are hashed and copied.
pub type Inspect<'a> = &'a dyn Fn(&ModelSource) -> Result<(), String>;

/// The releases of this node, over its data folder. Holds nothing in memory: every call reads the
/// folder as it is.
#[derive(Clone, Debug)]
pub struct Catalogue {
    data: PathBuf,
    reserve: DiskReserve,
}

impl Catalogue {
    pub fn new(data_folder: &Path) -> Self {
        Self { data: data_folder.to_owned(), reserve: DiskReserve::default() }
    }

    /// Leaves `bytes` free on the disk of the data folder, whatever is fetched or copied.
    #[must_use]
    pub fn leaving_free(self, bytes: u64) -> Self {
        Self { reserve: DiskReserve::new(&self.data, bytes), ..self }
    }

    /// Returns every release that is built in or in the data folder, by name. Each one whose
    /// manifest cannot be read is passed over with a warning.
    pub fn manifests(&self) -> Result<Vec<Manifest>> {
        let (found, bad) = self.known()?;
        for error in bad {
            tracing::warn!("{error}");
        }
        Ok(found)
    }

    /// The releases, and why each that is passed over is.
    fn known(&self) -> Result<(Vec<Manifest>, Vec<Error>)> {
        let (mut found, bad) = folder::manifests(&self.models())?;
        let new: Vec<Manifest> = Manifest::built_in()
            .into_iter()
            .filter(|m| found.iter().all(|other| other.name != m.name))
            .collect();
        found.extend(new);
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok((found, bad))
    }

    /// The release with this name, address, model id or release id.
    pub fn find(&self, wanted: &str) -> Result<Manifest> {
        let (all, bad) = self.known()?;
        let is_wanted = |m: &Manifest| {
            let ids = [m.id.to_string(), m.release_id.to_string()];
            m.name == wanted
                || m.address.as_deref() == Some(wanted)
                || ids.iter().any(|id| id == wanted)
        };
        let known = all.iter().map(|m| m.name.as_str()).collect::<Vec<_>>().join(", ");
        if let Some(found) = all.into_iter().find(is_wanted) {
            return Ok(found);
        }
        let is_bad =
            |error: &Error| matches!(error, Error::BadRelease { name, .. } if name == wanted);
        let unknown = || Error::Unknown { name: wanted.to_owned(), known };
        Err(bad.into_iter().find(is_bad).unwrap_or_else(unknown))
    }

    /// Writes a manifest in place of `before`, and notes the prices of both.
    pub fn replace_manifest(
        &self,
        before: &Manifest,
        manifest: &Manifest,
        at: UnixMillis,
    ) -> Result<()> {
        let folder = self.folder(&manifest.name);
        let _lock = folder.lock()?;
        folder.note_prices(before.prices, at)?;
        folder.write_manifest(manifest)?;
        folder.note_prices(manifest.prices, at)
    }

    pub fn is_pulled(&self, manifest: &Manifest) -> bool {
        self.folder(&manifest.name).check_complete(manifest).is_ok()
    }

    /// The release's files, which are here with their sizes. Nothing is said of their content.
    pub fn source(&self, manifest: &Manifest) -> Result<ModelSource> {
        let folder = self.folder(&manifest.name);
        folder.check_complete(manifest)?;
        Ok(folder.source(manifest))
    }

    /// Reads the files once and returns their digests.
    ///
    /// # Errors
    /// `WrongDigest` when one is not the manifest's.
    pub fn digests(&self, manifest: &Manifest) -> Result<FileDigests> {
        self.folder(&manifest.name).verify(manifest)
    }

    /// The identity that a verdict about this release on this host is bound to, before its files
    /// were read.
    pub fn identity(&self, manifest: &Manifest, host: &HostIdentity) -> Identity {
        let release = Release {
            name: manifest.name.clone(),
            release_id: manifest.release_id,
            origin: manifest.origin(),
            files: manifest.digests(),
            blake3: BTreeMap::new(),
            terms: manifest.terms(),
        };
        Identity { release, host: host.clone() }
    }

    /// Saves a record and returns its path. The release's newest records are kept beside it.
    pub fn save_record(&self, record: &Record) -> Result<PathBuf> {
        records::save(&self.data, record)
    }

    /// The records of a release that were signed here, newest first. Others are left out: they
    /// prove nothing.
    pub fn records(&self, name: &str) -> Result<Vec<Record>> {
        let stored = self.stored_records(name)?.into_iter();
        Ok(stored.filter_map(|stored| stored.content.ok()).collect())
    }

    fn stored_records(&self, name: &str) -> Result<Vec<StoredRecord>> {
        records::stored(&self.data, name)
    }

    /// The release of this name or id, or the one that was pulled from this place of the hub. One
    /// that no longer is as its files say is an error.
    pub fn known_as(&self, wanted: &str) -> Result<Option<Manifest>> {
        match (self.find(wanted), fetch::HubTarget::parse(wanted)) {
            (Err(Error::Unknown { .. }), Some(target)) => {
                Ok(self.manifests()?.into_iter().find(|manifest| target.gave(manifest)))
            }
            (Err(Error::Unknown { .. }), None) => Ok(None),
            (found, _) => found.map(Some),
        }
    }

    /// Fetches the files of a known release, or adds a release from a hub repository
    /// (`OWNER/REPOSITORY[/FILE.gguf][@REVISION]`) if `inspect` finds nothing against it. Files
    /// already here with the right digest are not fetched again.
    pub fn pull(
        &self,
        wanted: &str,
        inspect: Inspect,
        options: &FetchOptions,
        progress: &mut dyn FnMut(FetchProgress),
    ) -> Result<Manifest> {
        let manifest = match (self.find(wanted), fetch::HubTarget::parse(wanted)) {
            (Err(Error::Unknown { .. }), Some(target)) => {
                return self.pull_from_hub(&target, inspect, options, progress);
            }
            (Err(Error::Unknown { name, known }), None) => {
                return Err(match fetch::spelling(wanted) {
                    Some(hint) => Error::Misspelt { name, hint },
                    None => Error::Unknown { name, known },
                });
            }
            (found, _) => found?,
        };
        let folder = self.folder(&manifest.name);
        let _working = folder.lock()?;
        fetch::fetch(&manifest, &folder, &self.data, options, progress)?;
        folder.write_manifest(&manifest)?;
        Ok(manifest)
    }

    /// Removes a release's files and records and returns its name. Its manifest need not be
    /// readable. A built-in release stays known and can be pulled again.
    pub fn remove(&self, wanted: &str) -> Result<String> {
        let name = match self.find(wanted) {
            Err(Error::BadRelease { name, .. }) => name,
            // What a pull left that was interrupted is no release yet.
            Err(Error::Unknown { name, .. }) if self.parts()?.contains_key(&name) => name,
            found => found?.name,
        };
        let folder = self.folder(&name);
        if !folder.path().exists() {
            return Err(Error::NotPulled { name });
        }
        let working = folder.lock()?;
        folder::remove_all(folder.path())?;
        drop(working);
        folder::remove_all(&self.data.join("qualification").join(&name))?;
        Ok(name)
    }

    /// Bytes of files that interrupted pulls left, by the name that their release would have. The
    /// next pull of the release goes on with them; `remove` removes them.
    pub fn parts(&self) -> Result<BTreeMap<String, u64>> {
        folder::parts(&self.models())
    }

    fn models(&self) -> PathBuf {
        self.data.join("models")
    }

    fn folder(&self, name: &str) -> ReleaseFolder {
        ReleaseFolder::new(self.models().join(name), name, self.reserve.clone())
    }
}

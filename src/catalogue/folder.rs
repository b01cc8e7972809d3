//! One release's folder: its files, its manifest, and stamps, which tell whether a file has changed
//! since its digest was checked.

use super::{Error, Manifest, Result};
use cresset_models::ModelSource;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

pub(super) const MANIFEST: &str = "manifest.toml";
const STAMPS: &str = ".verified.json";
/// Folder of unfinished downloads. Nothing in it is ever loaded.
const INCOMING: &str = ".incoming";
const LOCK: &str = ".lock";

pub(super) struct ReleaseFolder {
    path: PathBuf,
    name: String,
}

/// Size and time of change of a file when its digest was last computed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    sha256: String,
    bytes: u64,
    /// Nanoseconds since the Unix epoch.
    modified: u128,
}

/// The manifests of all releases under `models`.
pub(super) fn manifests(models: &Path) -> Result<Vec<Manifest>> {
    let entries = match fs::read_dir(models) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("list", models)(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(Error::io("list", models))?.path().join(MANIFEST);
        if path.is_file() {
            let text = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
            found.push(Manifest::parse(&text, &path.display().to_string())?);
        }
    }
    Ok(found)
}

pub(super) fn remove_all(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// SHA-256 of a file in lower-case hex. `on_bytes` gets the size of each part that was read.
pub(super) fn sha256(path: &Path, mut on_bytes: impl FnMut(u64)) -> Result<String> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer).map_err(Error::io("read", path))?;
        if n == 0 {
            return Ok(hex::encode(hasher.finalize()));
        }
        hasher.update(&buffer[..n]);
        on_bytes(n as u64);
    }
}

/// Writes beside `path` and renames, so that a reader sees the old or the new content, never a
/// part.
pub(super) fn write_whole(path: &Path, content: &[u8]) -> Result<()> {
    let part = path.with_extension("part");
    fs::write(&part, content).map_err(Error::io("write", &part))?;
    fs::rename(&part, path).map_err(Error::io("rename", &part))
}

impl ReleaseFolder {
    pub(super) fn new(path: PathBuf, name: &str) -> Self {
        Self { path, name: name.to_owned() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn incoming(&self) -> PathBuf {
        self.path.join(INCOMING)
    }

    /// Locks the release for changes until the returned file is dropped.
    ///
    /// # Errors
    /// `Busy` when another process holds the lock.
    pub(super) fn lock(&self) -> Result<File> {
        fs::create_dir_all(&self.path).map_err(Error::io("create", &self.path))?;
        let path = self.path.join(LOCK);
        let file = File::create(&path).map_err(Error::io("create", &path))?;
        file.try_lock().map_err(|_| Error::Busy(self.name.clone()))?;
        Ok(file)
    }

    pub(super) fn write_manifest(&self, manifest: &Manifest) -> Result<()> {
        write_whole(&self.path.join(MANIFEST), manifest.to_toml().as_bytes())
    }

    /// Whether every file is here with its size. `verify` checks the digests.
    pub(super) fn is_complete(&self, manifest: &Manifest) -> bool {
        let has = |file: &super::ReleaseFile| {
            fs::metadata(self.path.join(&file.name)).is_ok_and(|found| found.len() == file.bytes)
        };
        manifest.files.iter().all(has)
    }

    pub(super) fn source(&self, manifest: &Manifest) -> ModelSource {
        match manifest.files.as_slice() {
            [file] if is_gguf(&file.name) => ModelSource::Gguf(self.path.join(&file.name)),
            _ => ModelSource::HfFolder(self.path.clone()),
        }
    }

    /// Checks that every file has the manifest's digest. A file whose size and time of change are
    /// those of the last check is not read again.
    pub(super) fn verify(&self, manifest: &Manifest) -> Result<()> {
        let known = self.stamps();
        let mut stamps = BTreeMap::new();
        for file in &manifest.files {
            let path = self.path.join(&file.name);
            let now = self.stamp(&path, || known.get(&file.name))?;
            if now.sha256 != file.sha256 {
                let (name, expected) = (self.name.clone(), file.sha256.clone());
                return Err(Error::WrongDigest { name, path, found: now.sha256, expected });
            }
            stamps.insert(file.name.clone(), now);
        }
        if stamps != known {
            let text = serde_json::to_vec(&stamps).expect("stamps are representable in JSON");
            write_whole(&self.path.join(STAMPS), &text)?;
        }
        Ok(())
    }

    pub(super) fn digests(&self, manifest: &Manifest) -> Result<BTreeMap<String, String>> {
        let digest = |file: &super::ReleaseFile| {
            Ok((file.name.clone(), sha256(&self.path.join(&file.name), |_| {})?))
        };
        manifest.files.iter().map(digest).collect()
    }

    fn stamps(&self) -> BTreeMap<String, Stamp> {
        let text = fs::read(self.path.join(STAMPS)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    fn stamp<'a>(&self, path: &Path, known: impl FnOnce() -> Option<&'a Stamp>) -> Result<Stamp> {
        let found = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::NotPulled { name: self.name.clone() });
            }
            found => found.map_err(Error::io("read", path))?,
        };
        let modified = found.modified().map_err(Error::io("read", path))?;
        let modified = modified.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        match known().filter(|stamp| (stamp.bytes, stamp.modified) == (found.len(), modified)) {
            Some(stamp) => Ok(stamp.clone()),
            None => Ok(Stamp { sha256: sha256(path, |_| {})?, bytes: found.len(), modified }),
        }
    }
}

pub(super) fn is_gguf(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf"))
}

//! One release's folder: its files and its manifest.

use super::manifest::MANIFEST;
use super::{Error, Manifest, Result};
use cresset_base::{DiskReserve, FileLock, durable_file};
use cresset_models::ModelSource;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Folder of unfinished downloads. Nothing in it is ever loaded.
const INCOMING: &str = ".incoming";
/// The ending of a hidden file that is being copied to its place.
pub(super) const PART: &str = ".part";
const LOCK: &str = ".lock";

pub(super) struct ReleaseFolder {
    path: PathBuf,
    name: String,
    reserve: DiskReserve,
}

/// The manifests of all releases under `models`, and why each that cannot be read cannot.
pub(super) fn manifests(models: &Path) -> Result<(Vec<Manifest>, Vec<Error>)> {
    let entries = match fs::read_dir(models) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Default::default()),
        Err(error) => return Err(Error::io("list", models)(error)),
    };
    let (mut found, mut bad) = (Vec::new(), Vec::new());
    for entry in entries {
        let folder = entry.map_err(Error::io("list", models))?.path();
        let path = folder.join(MANIFEST);
        if path.is_file() {
            match manifest_in(&folder, &path) {
                Ok(manifest) => found.push(manifest),
                Err(why) => bad.push(Error::BadRelease { name: name_of(&folder), why }),
            }
        }
    }
    Ok((found, bad))
}

/// Bytes that interrupted transfers left, by the folder's name.
pub(super) fn parts(models: &Path) -> Result<BTreeMap<String, u64>> {
    let entries = match fs::read_dir(models) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        entries => entries.map_err(Error::io("list", models))?,
    };
    let mut found = BTreeMap::new();
    for entry in entries {
        let folder = entry.map_err(Error::io("list", models))?.path();
        let copies = fs::read_dir(&folder).into_iter().flatten().flatten();
        let copies = copies.map(|entry| entry.path()).filter(|path| is_part(path));
        let bytes = copies.map(|path| size(&path)).sum::<u64>() + size(&folder.join(INCOMING));
        if bytes > 0 {
            found.insert(name_of(&folder), bytes);
        }
    }
    Ok(found)
}

/// Whether a file is a copy that was not ended.
fn is_part(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with('.') && name.ends_with(PART)
}

/// Bytes of a file, or under a folder.
pub(super) fn size(path: &Path) -> u64 {
    if !path.is_dir() {
        return path.metadata().map_or(0, |found| found.len());
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| size(&entry.path())).sum()
}

fn manifest_in(folder: &Path, path: &Path) -> Result<Manifest, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let origin = path.display().to_string();
    let manifest = Manifest::parse(&text, &origin).map_err(|error| error.to_string())?;
    let name = name_of(folder);
    if manifest.name == name {
        return Ok(manifest);
    }
    Err(format!("{origin}: it is the manifest of {:?}, not of {name:?}", manifest.name))
}

fn name_of(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

pub(super) fn remove_all(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// The digests of a release's files by name, in lower-case hex.
#[derive(Debug, Default)]
pub struct FileDigests {
    pub sha256: BTreeMap<String, String>,
    pub blake3: BTreeMap<String, String>,
}

/// Size, inode and times of a file. The content may have changed where one of them has, and a
/// forger can change the content without changing them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileStamp {
    bytes: u64,
    place: (u64, u64),
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileStamp {
    fn of(found: &fs::Metadata) -> Self {
        Self {
            bytes: found.len(),
            place: (found.dev(), found.ino()),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        }
    }
}

/// SHA-256 of a file in lower-case hex. `on_bytes` gets the size of each part that was read.
pub(super) fn sha256(path: &Path, mut on_bytes: impl FnMut(u64)) -> Result<String> {
    let mut hasher = Sha256::new();
    read(path, |piece| {
        hasher.update(piece);
        on_bytes(piece.len() as u64);
    })?;
    Ok(hex::encode(hasher.finalize()))
}

/// Gives a file's bytes to `on_piece`, in order.
fn read(path: &Path, mut on_piece: impl FnMut(&[u8])) -> Result<()> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(Error::io("read", path))? {
            0 => return Ok(()),
            n => on_piece(&buffer[..n]),
        }
    }
}

/// Writes a file as a whole and durably.
pub(super) fn write_whole(path: &Path, content: &[u8]) -> Result<()> {
    durable_file::replace(path, content, None).map_err(Error::io("write", path))
}

impl ReleaseFolder {
    pub(super) fn new(path: PathBuf, name: &str, reserve: DiskReserve) -> Self {
        Self { path, name: name.to_owned(), reserve }
    }

    /// Space that files of the release leave free.
    pub(super) fn reserve(&self) -> &DiskReserve {
        &self.reserve
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn incoming(&self) -> PathBuf {
        self.path.join(INCOMING)
    }

    /// Locks the release for changes until the lock is dropped.
    ///
    /// # Errors
    /// `Busy` when another process holds the lock.
    pub(super) fn lock(&self) -> Result<FileLock> {
        fs::create_dir_all(&self.path).map_err(Error::io("create", &self.path))?;
        let path = self.path.join(LOCK);
        let file = File::create(&path).map_err(Error::io("create", &path))?;
        FileLock::take(file).map_err(|_| Error::Busy(self.name.clone()))
    }

    /// Makes the folder a release. Its name and its files, which were synced before, are durable
    /// with the manifest.
    pub(super) fn write_manifest(&self, manifest: &Manifest) -> Result<()> {
        write_whole(&self.path.join(MANIFEST), manifest.to_toml().as_bytes())?;
        let sync = |path: &Path| durable_file::sync_name(path).map_err(Error::io("sync", path));
        self.path.ancestors().take(2).try_for_each(sync)
    }

    /// Fails unless every file is here with its size. Digests are checked where the files are read.
    pub(super) fn check_complete(&self, manifest: &Manifest) -> Result<Vec<FileStamp>> {
        let mut stamps = Vec::new();
        for file in &manifest.files {
            let path = self.path.join(&file.name);
            let name = || self.name.clone();
            match fs::metadata(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(Error::NotPulled { name: name() });
                }
                Err(error) => return Err(Error::io("read", &path)(error)),
                Ok(found) if found.len() == file.bytes => stamps.push(FileStamp::of(&found)),
                Ok(found) => {
                    let (found, expected) = (found.len(), file.bytes);
                    return Err(Error::WrongSize { name: name(), path, found, expected });
                }
            }
        }
        Ok(stamps)
    }

    /// The files, taken as they are.
    pub(super) fn source(&self, manifest: &Manifest) -> ModelSource {
        let paths: Vec<_> = manifest.files.iter().map(|file| self.path.join(&file.name)).collect();
        source_of(&paths)
    }

    /// Reads every file once, checks that it has the manifest's SHA-256, and returns both digests
    /// of the bytes.
    pub(super) fn verify(&self, manifest: &Manifest) -> Result<FileDigests> {
        self.check_complete(manifest)?;
        let mut digests = FileDigests { sha256: BTreeMap::new(), blake3: BTreeMap::new() };
        for file in &manifest.files {
            let path = self.path.join(&file.name);
            let (mut sha256, mut blake3) = (Sha256::new(), blake3::Hasher::new());
            read(&path, |piece| {
                sha256.update(piece);
                blake3.update(piece);
            })?;
            let found = hex::encode(sha256.finalize());
            if found != file.sha256 {
                let (name, expected) = (self.name.clone(), file.sha256.clone());
                return Err(Error::WrongDigest { name, path, found, expected });
            }
            digests.sha256.insert(file.name.clone(), found);
            digests.blake3.insert(file.name.clone(), blake3.finalize().to_hex().to_string());
        }
        Ok(digests)
    }
}

/// The files of a model, taken as they are: one GGUF file or its shards in order, or those of a
/// folder.
pub(super) fn source_of(files: &[PathBuf]) -> ModelSource {
    match files {
        [file, ..] if is_gguf(&file.to_string_lossy()) => ModelSource::gguf(file.clone()),
        _ => {
            let folder = files.first().and_then(|file| file.parent());
            ModelSource::hf_folder(folder.unwrap_or(Path::new("")).to_owned())
        }
    }
}

pub(super) fn is_gguf(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf"))
}

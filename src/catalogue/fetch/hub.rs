//! Fetches from the Hugging Face hub, or from a mirror with the same protocol.

use super::super::Error;
use super::incoming::adopt;
use super::{FetchOptions, SourceFailure, Want};
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};

/// Attempts beyond the first when a transfer breaks.
const RETRIES: usize = 2;

/// A repository on the hub as a user names it: `OWNER/REPOSITORY[/FILE.gguf][@REVISION]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct HubTarget {
    pub repo: String,
    pub file: Option<String>,
    pub revision: String,
}

impl HubTarget {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (path, revision) = text.split_once('@').unwrap_or((text, "main"));
        let (owner, rest) = path.split_once('/')?;
        let (repository, file) =
            rest.split_once('/').map_or((rest, None), |(r, file)| (r, Some(file.to_owned())));
        let word = |w: &str| {
            !w.is_empty() && w.bytes().all(|c| c.is_ascii_alphanumeric() || b"-._".contains(&c))
        };
        let valid =
            word(owner) && word(repository) && !revision.is_empty() && file.as_deref() != Some("");
        valid.then(|| Self {
            repo: format!("{owner}/{repository}"),
            file,
            revision: revision.to_owned(),
        })
    }
}

/// The contents of a repository at a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Listing {
    /// The commit that the revision's name refers to now.
    pub revision: String,
    pub files: Vec<String>,
    /// SPDX-like name, where the model card gives one.
    pub license: Option<String>,
}

pub(in super::super) fn describe(
    target: &HubTarget,
    cache: &Path,
    options: &FetchOptions,
) -> Result<Listing, String> {
    let repo = open(&target.repo, &target.revision, cache, options)?;
    let (sender, receiver) = sync_channel(1);
    #[expect(
        clippy::disallowed_methods,
        reason = "it may wait for the hub after its caller has given up"
    )]
    std::thread::spawn(move || sender.send(listing(&repo)));
    let told = |error| match error {
        RecvTimeoutError::Timeout => silent(options),
        RecvTimeoutError::Disconnected => "the transfer ended unexpectedly".to_owned(),
    };
    receiver.recv_timeout(options.patience).map_err(told)?
}

fn listing(repo: &ApiRepo) -> Result<Listing, String> {
    let mut response = repo.info_request().call().map_err(|error| with_hint(&error.to_string()))?;
    let info: serde_json::Value =
        response.body_mut().read_json().map_err(|error| error.to_string())?;
    let revision = info["sha"].as_str().ok_or("the hub's answer names no commit")?.to_owned();
    let siblings = info["siblings"].as_array().ok_or("the hub's answer lists no files")?;
    let names = siblings.iter().filter_map(|sibling| sibling["rfilename"].as_str());
    let files = names.filter(|name| is_inside(name)).map(str::to_owned).collect();
    let license = info["cardData"]["license"].as_str().map(str::to_owned);
    Ok(Listing { revision, files, license })
}

/// Names become paths in the cache, so a name that leads out of it is refused.
fn is_inside(name: &str) -> bool {
    Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

pub(super) fn fetch(
    repo: &str,
    revision: &str,
    path: &str,
    want: &mut Want,
) -> Result<(), SourceFailure> {
    let cache = want.folder.incoming().join("hub");
    let options = want.options;
    let downloaded = download(repo, revision, path, &cache, options, &mut |done| want.report(done));
    let downloaded = downloaded.map_err(|error| match error {
        Download::DiskFull => SourceFailure::Here(Error::DiskFull { path: cache.clone() }),
        Download::Failed(why) => SourceFailure::Source(why),
    })?;
    adopt(&downloaded, want)
}

#[derive(Debug)]
pub(in super::super) enum Download {
    DiskFull,
    Failed(String),
}

/// Downloads one file into `cache`; a broken transfer is resumed where it stopped. `progress` gets
/// the bytes so far.
pub(in super::super) fn download(
    repo: &str,
    revision: &str,
    path: &str,
    cache: &Path,
    options: &FetchOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<PathBuf, Download> {
    let repo = open(repo, revision, cache, options).map_err(Download::Failed)?;
    let (sender, receiver) = sync_channel(64);
    let path = path.to_owned();
    // The transfer has a thread of its own, because a silent connection can only be abandoned, not
    // interrupted.
    #[expect(
        clippy::disallowed_methods,
        reason = "it may wait for the hub after its caller has given up"
    )]
    std::thread::spawn(move || {
        let done = repo.download_with_progress(&path, Meter(sender.clone()));
        // Sending fails when the waiting side has given the transfer up.
        let _ = sender.send(TransferEvent::Ended(done));
    });
    let pointer = watch(&receiver, options, progress)?;
    pointer.canonicalize().map_err(|error| Download::Failed(error.to_string()))
}

fn watch(
    receiver: &Receiver<TransferEvent>,
    options: &FetchOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<PathBuf, Download> {
    let mut done = 0;
    loop {
        match receiver.recv_timeout(options.patience) {
            Ok(TransferEvent::Started) => done = 0,
            Ok(TransferEvent::Bytes(n)) => {
                done += n;
                progress(done);
            }
            Ok(TransferEvent::Ended(result)) => return result.map_err(explain),
            Err(RecvTimeoutError::Timeout) => return Err(Download::Failed(silent(options))),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Download::Failed("the transfer ended unexpectedly".into()));
            }
        }
    }
}

fn silent(options: &FetchOptions) -> String {
    format!("no answer for {} s", options.patience.as_secs_f32())
}

fn explain(error: ApiError) -> Download {
    match error {
        ApiError::IoError(error) if error.kind() == std::io::ErrorKind::StorageFull => {
            Download::DiskFull
        }
        ApiError::TooManyRetries(last) => explain(*last),
        other => Download::Failed(with_hint(&other.to_string())),
    }
}

/// The hub answers 401 for private and for missing repositories alike.
fn with_hint(error: &str) -> String {
    let closed = ["401", "403"].iter().any(|status| error.ends_with(status));
    let hint =
        if closed { " (gated, private or misspelt: set hub.token, or check the name)" } else { "" };
    format!("{error}{hint}")
}

fn open(
    repo: &str,
    revision: &str,
    cache: &Path,
    options: &FetchOptions,
) -> Result<ApiRepo, String> {
    let repo = Repo::with_revision(repo.to_owned(), RepoType::Model, revision.to_owned());
    Ok(api(cache, options).map_err(|error| error.to_string())?.repo(repo))
}

fn api(cache: &Path, options: &FetchOptions) -> Result<Api, ApiError> {
    let builder = ApiBuilder::from_cache(Cache::new(cache.to_owned()))
        .with_progress(false)
        .with_retries(RETRIES)
        .with_token(options.token.clone());
    match &options.endpoint {
        Some(endpoint) => builder.with_endpoint(endpoint.trim_end_matches('/').to_owned()).build(),
        None => builder.build(),
    }
}

enum TransferEvent {
    Started,
    Bytes(u64),
    Ended(Result<PathBuf, ApiError>),
}

/// Sends the progress of a transfer to the waiting side.
struct Meter(SyncSender<TransferEvent>);

impl hf_hub::api::Progress for Meter {
    fn init(&mut self, _size: usize, _filename: &str) {
        let _ = self.0.send(TransferEvent::Started);
    }

    fn update(&mut self, size: usize) {
        let _ = self.0.send(TransferEvent::Bytes(size as u64));
    }

    fn finish(&mut self) {}
}

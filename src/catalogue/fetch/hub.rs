//! Fetches from the Hugging Face hub, or from a mirror with the same protocol. `hf-hub` makes
//! addresses and headers; files are written here, and no answer of the hub becomes part of a path
//! before it was checked.

use super::incoming::{PartFile, part_of, place};
use super::target::{is_safe_path, is_word};
use super::{FetchOptions, HubTarget, SourceFailure, Want};
use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

/// Attempts beyond the first when a transfer breaks.
const RETRIES: usize = 2;
/// Bytes of a piece of a transfer.
const PIECE: usize = 1 << 18;
const PUBLIC_HUB: &str = "https://huggingface.co";
/// Licences have short names; a longer text is none.
const MAX_LICENSE_BYTES: usize = 100;

/// The contents of a repository at a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Listing {
    /// The commit that the revision's name refers to now.
    pub revision: String,
    pub files: Vec<String>,
    /// SHA-256 of files, where the hub gives them.
    pub digests: BTreeMap<String, String>,
    /// SPDX-like name, where the model card gives one.
    pub license: Option<String>,
}

pub(in super::super) fn describe(
    target: &HubTarget,
    options: &FetchOptions,
) -> Result<Listing, String> {
    let repo = open(&target.repo, &target.revision, options)?;
    let (sender, receiver) = sync_channel(1);
    let endpoint = endpoint(options).to_owned();
    let describe = move || {
        // Sending fails when the waiting side has given the answer up.
        let _ = sender.send(listing(&repo, &endpoint));
    };
    thread(describe)?;
    let told = |error| match error {
        RecvTimeoutError::Timeout => silent(options.patience),
        RecvTimeoutError::Disconnected => "the transfer ended unexpectedly".to_owned(),
    };
    receiver.recv_timeout(options.patience).map_err(told)?
}

/// The hub's answer has at most the 10 MB that the client reads of a JSON document.
fn listing(repo: &ApiRepo, endpoint: &str) -> Result<Listing, String> {
    let mut response = repo
        .info_request()
        .query("blobs", "true")
        .call()
        .map_err(|error| explain(&error.to_string(), endpoint))?;
    let info: serde_json::Value =
        response.body_mut().read_json().map_err(|error| error.to_string())?;
    read_listing(&info)
}

/// Commit and names become paths and addresses. A commit that cannot be one is refused; such a
/// file is none that a model needs, and is left out.
pub(super) fn read_listing(info: &serde_json::Value) -> Result<Listing, String> {
    let revision = info["sha"].as_str().ok_or("the hub's answer names no commit")?;
    if !is_word(revision) {
        return Err(format!("the hub's answer names the commit {revision:.80?}: that is none"));
    }
    let siblings = info["siblings"].as_array().ok_or("the hub's answer lists no files")?;
    let names = siblings.iter().filter_map(|sibling| sibling["rfilename"].as_str());
    let mut files: Vec<String> =
        names.filter(|name| is_safe_path(name)).map(str::to_owned).collect();
    files.sort();
    files.dedup();
    let digest = |sibling: &serde_json::Value| {
        let name = sibling["rfilename"].as_str()?.to_owned();
        Some((name, sibling["lfs"]["sha256"].as_str()?.to_owned()))
    };
    let digests = siblings.iter().filter_map(digest).collect();
    let license = info["cardData"]["license"].as_str().map(str::to_owned);
    let license = license.filter(|name| name.len() <= MAX_LICENSE_BYTES);
    Ok(Listing { revision: revision.to_owned(), files, digests, license })
}

pub(super) fn fetch(
    repo: &str,
    revision: &str,
    path: &str,
    want: &mut Want,
) -> Result<(), SourceFailure> {
    let transfer = |part: &mut PartFile, want: &mut Want| {
        let options = want.options;
        let mut report = |done, _| want.report(done);
        if part.is_full() {
            return Ok(());
        }
        download(repo, revision, path, part, options, &mut report)
    };
    let mut part = part_of(want)?;
    let resumed = part.done() > 0;
    transfer(&mut part, want)?;
    match place(part, want) {
        // The part that an earlier transfer left may be damaged, so it is deleted now.
        Err(SourceFailure::Source(_)) if resumed => {
            let mut part = part_of(want)?;
            transfer(&mut part, want)?;
            place(part, want)
        }
        placed => placed,
    }
}

/// Downloads one file into `part`; a broken transfer goes on where it stopped. `progress` gets the
/// bytes so far, and all bytes of the file if the hub says how many there are.
pub(in super::super) fn download(
    repo: &str,
    revision: &str,
    path: &str,
    part: &mut PartFile,
    options: &FetchOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SourceFailure> {
    let mut last = SourceFailure::Source("nothing was tried".into());
    for _ in 0..=RETRIES {
        let mut transfer = match Transfer::begin(repo, revision, path, part.done(), options) {
            // A part with nothing behind it, of a size that was not known.
            Err(why) if part.done() > 0 && why.contains("416") => {
                part.restart()?;
                Transfer::begin(repo, revision, path, 0, options)
            }
            begun => begun,
        }
        .map_err(SourceFailure::Source)?;
        if transfer.start == 0 {
            part.restart()?;
        }
        let total = transfer.total;
        part.expect(total)?;
        match part.append(&mut transfer, &mut |done| progress(done, total)) {
            Err(broken @ SourceFailure::Source(_)) => last = broken,
            ended => return ended,
        }
    }
    Err(last)
}

/// The body of one answer. It is read on a thread of its own, because a silent connection can only
/// be abandoned, not interrupted.
struct Transfer {
    start: u64,
    /// Length of the whole file; 0 if the hub does not say.
    total: u64,
    pieces: Receiver<TransferEvent>,
    piece: io::Cursor<Vec<u8>>,
    patience: Duration,
    ended: bool,
}

enum TransferEvent {
    Begun { start: u64, total: u64 },
    Piece(Vec<u8>),
    Ended(Result<(), String>),
}

impl Transfer {
    /// Asks for a file from byte `from` on.
    fn begin(
        repo: &str,
        revision: &str,
        path: &str,
        from: u64,
        options: &FetchOptions,
    ) -> Result<Self, String> {
        let (repo, path) = (open(repo, revision, options)?, path.to_owned());
        let (sender, pieces) = sync_channel(4);
        let endpoint = endpoint(options).to_owned();
        thread(move || {
            let ended = send(&repo, &path, from, &endpoint, &sender);
            // Sending fails when the waiting side has given the transfer up.
            let _ = sender.send(TransferEvent::Ended(ended));
        })?;
        match pieces.recv_timeout(options.patience) {
            Ok(TransferEvent::Begun { start, total }) if start == from || start == 0 => {
                let piece = io::Cursor::default();
                Ok(Self { start, total, pieces, piece, patience: options.patience, ended: false })
            }
            Ok(TransferEvent::Ended(Err(why))) => Err(why),
            Err(RecvTimeoutError::Timeout) => Err(silent(options.patience)),
            _ => Err("the hub answered with another part of the file".into()),
        }
    }
}

impl Read for Transfer {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let n = self.piece.read(buffer)?;
            if n > 0 || self.ended {
                return Ok(n);
            }
            match self.pieces.recv_timeout(self.patience) {
                Ok(TransferEvent::Piece(bytes)) => self.piece = io::Cursor::new(bytes),
                Ok(TransferEvent::Ended(Ok(()))) => self.ended = true,
                Ok(TransferEvent::Ended(Err(why))) => return Err(io::Error::other(why)),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(io::Error::new(ErrorKind::TimedOut, silent(self.patience)));
                }
                _ => return Err(io::Error::other("the transfer ended unexpectedly")),
            }
        }
    }
}

/// Sends a file's bytes from `from` on. It gives up when nobody listens any more.
fn send(
    repo: &ApiRepo,
    path: &str,
    from: u64,
    endpoint: &str,
    to: &SyncSender<TransferEvent>,
) -> Result<(), String> {
    let request = repo.info_request().uri(repo.url(path));
    // A compressed body would have other positions.
    let request =
        request.header("Range", format!("bytes={from}-")).header("Accept-Encoding", "identity");
    let response = request.call().map_err(|error| explain(&error.to_string(), endpoint))?;
    let (start, total) = match response.headers().get("content-range") {
        Some(range) if response.status().as_u16() == 206 => {
            range.to_str().ok().and_then(content_range).ok_or("the hub's Content-Range is none")?
        }
        _ => (0, response.body().content_length().unwrap_or(0)),
    };
    let mut body = response.into_body().into_reader();
    let mut event = TransferEvent::Begun { start, total };
    while to.send(event).is_ok() {
        let mut piece = Vec::new();
        let read = body.by_ref().take(PIECE as u64).read_to_end(&mut piece);
        match read {
            Ok(0) => break,
            Ok(_) => event = TransferEvent::Piece(piece),
            Err(error) => {
                // What was read before it broke need not be fetched again.
                let _ = to.send(TransferEvent::Piece(piece));
                return Err(error.to_string());
            }
        }
    }
    Ok(())
}

/// First byte and length of `bytes FIRST-LAST/LENGTH`.
fn content_range(text: &str) -> Option<(u64, u64)> {
    let (range, length) = text.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, length.parse().unwrap_or(0)))
}

fn silent(patience: Duration) -> String {
    format!("no answer for {} s", patience.as_secs_f32())
}

/// The hub answers 401 for private and for missing repositories alike. Without a status there was
/// no answer at all.
fn explain(error: &str, endpoint: &str) -> String {
    if !error.starts_with("http status") {
        return format!(
            "{endpoint} cannot be reached ({error}): check the network, or set hub.endpoint to a \
             mirror"
        );
    }
    let closed = ["401", "403"].iter().any(|status| error.ends_with(status));
    let hint =
        if closed { " (gated, private or misspelt: set hub.token, or check the name)" } else { "" };
    format!("{error}{hint}")
}

fn endpoint(options: &FetchOptions) -> &str {
    options.endpoint.as_deref().unwrap_or(PUBLIC_HUB).trim_end_matches('/')
}

/// The repository's addresses. The cache is never written to.
fn open(repo: &str, revision: &str, options: &FetchOptions) -> Result<ApiRepo, String> {
    let repo = Repo::with_revision(repo.to_owned(), RepoType::Model, revision.to_owned());
    let api = ApiBuilder::from_cache(Cache::new(PathBuf::new()))
        .with_progress(false)
        .with_token(options.token.clone())
        .with_endpoint(endpoint(options).to_owned())
        .build();
    Ok(api.map_err(|error| error.to_string())?.repo(repo))
}

fn thread(work: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let started = std::thread::Builder::new().name("hub".into()).spawn(work);
    started.map(drop).map_err(|error| format!("no thread can be started: {error}"))
}

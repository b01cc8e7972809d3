//! The last step of every source: a file gets its final name only when its digest is right.

use super::super::folder::sha256;
use super::super::{Error, ReleaseFile};
use super::{SourceFailure, Want};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

/// Writes a stream to the incoming folder while hashing it, then moves it to its place.
pub(super) fn receive(from: &mut dyn Read, want: &mut Want) -> Result<(), SourceFailure> {
    let incoming = want.folder.incoming();
    fs::create_dir_all(&incoming).map_err(Error::io("create", &incoming))?;
    let part = incoming.join(&want.file.name);
    let found = copy(from, &part, want).inspect_err(|_| drop(fs::remove_file(&part)))?;
    move_if_right(&part, &found, want)
}

/// Checks a complete file that a source left on this disk, and moves it to its place.
pub(super) fn adopt(path: &Path, want: &mut Want) -> Result<(), SourceFailure> {
    let found = sha256(path, |_| {})?;
    move_if_right(path, &found, want)
}

fn copy(from: &mut dyn Read, part: &Path, want: &mut Want) -> Result<String, SourceFailure> {
    let mut out = File::create(part).map_err(Error::io("create", part))?;
    let (mut hasher, mut done) = (Sha256::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = from
            .read(&mut buffer)
            .map_err(|error| SourceFailure::Source(format!("reading failed: {error}")))?;
        done += n as u64;
        if n == 0 {
            break;
        }
        if done > want.file.bytes {
            return Err(SourceFailure::Source(format!(
                "it is longer than the {} bytes of the manifest",
                want.file.bytes
            )));
        }
        hasher.update(&buffer[..n]);
        out.write_all(&buffer[..n]).map_err(Error::io("write", part))?;
        want.report(done);
    }
    out.sync_all().map_err(Error::io("write", part))?;
    Ok(hex::encode(hasher.finalize()))
}

/// Moves a file to its place if the digest `found` is the manifest's; deletes it otherwise.
fn move_if_right(part: &Path, found: &str, want: &Want) -> Result<(), SourceFailure> {
    let ReleaseFile { name, sha256, .. } = want.file;
    if found != sha256 {
        fs::remove_file(part).map_err(Error::io("remove", part))?;
        return Err(SourceFailure::Source(format!(
            "{name} has SHA-256 {found}, the manifest says {sha256}: refused"
        )));
    }
    fs::rename(part, want.folder.path().join(name)).map_err(Error::io("rename", part))?;
    Ok(())
}

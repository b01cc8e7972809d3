//! The seal of a backup: the digest of all its bytes, written at its end. A restore compares
//! it first, so that no changed byte of a backup is ever used, wherever in the file it lies.

use super::disk;
use crate::{StoreError, StoreResult};
use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

const MARK: [u8; 16] = *b"cresset sealed 1";
/// The mark, then SHA-256 of everything before it.
const SEAL_BYTES: usize = MARK.len() + 32;

/// Appends the seal to a completed file, durably.
pub(super) fn append(path: &Path) -> StoreResult {
    let seal = || {
        let mut file = OpenOptions::new().read(true).append(true).open(path)?;
        let length = file.metadata()?.len();
        let digest = copy_hashing(&mut file, length, &mut io::sink())?;
        file.write_all(&[&MARK[..], &digest].concat())?;
        file.sync_all()
    };
    seal().map_err(|error| disk::unusable(path, "cannot be completed; free space there", &error))
}

/// Copies a backup, without its seal, to a file of the owner alone. Returns whether it has a seal,
/// which then is right.
pub(super) fn copy(from: &Path, to: &Path) -> StoreResult<bool> {
    match try_copy(from, to) {
        Ok((Some(sealed), digest)) if sealed != digest => Err(StoreError::Unusable(format!(
            "{} is damaged: its bytes are not those that were written; use another backup",
            from.display()
        ))),
        Ok((sealed, _)) => Ok(sealed.is_some()),
        Err(error) => Err(disk::unusable(
            from,
            "cannot be copied; check its name, who may read it, and free space",
            &error,
        )),
    }
}

/// Returns the digest that the seal tells, if there is one, and that of the copied bytes.
fn try_copy(from: &Path, to: &Path) -> io::Result<(Option<[u8; 32]>, [u8; 32])> {
    let mut source = File::open(from)?;
    let length = source.metadata()?.len();
    let sealed = read_seal(&mut source, length)?;
    source.rewind()?;
    let content = length - sealed.map_or(0, |_| SEAL_BYTES as u64);
    let digest = copy_hashing(&mut source, content, &mut disk::create_private(to)?)?;
    Ok((sealed, digest))
}

fn read_seal(file: &mut File, length: u64) -> io::Result<Option<[u8; 32]>> {
    let Some(place) = length.checked_sub(SEAL_BYTES as u64) else { return Ok(None) };
    let (mut mark, mut digest) = ([0; MARK.len()], [0; 32]);
    file.seek(SeekFrom::Start(place))?;
    file.read_exact(&mut mark)?;
    file.read_exact(&mut digest)?;
    Ok((mark == MARK).then_some(digest))
}

/// Copies the next `length` bytes and returns their SHA-256.
fn copy_hashing(from: &mut File, length: u64, to: &mut impl Write) -> io::Result<[u8; 32]> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut rest = from.take(length);
    loop {
        match rest.read(&mut buffer)? {
            0 if rest.limit() > 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            0 => return Ok(hasher.finalize().into()),
            count => {
                hasher.update(&buffer[..count]);
                to.write_all(&buffer[..count])?;
            }
        }
    }
}

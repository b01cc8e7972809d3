//! The last step of every source: bytes are written and hashed as they come, never more than are
//! expected, and a file gets its final name only when its digest is right.

use super::super::{Error, ReleaseFile};
use super::{SourceFailure, Want};
use cresset_base::DiskReserve;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Bytes that are read at once.
const PIECE: usize = 1 << 20;

/// A file on its way. It is kept when a transfer breaks, so that the next one can go on.
pub(in super::super) struct PartFile {
    path: PathBuf,
    out: File,
    hasher: Sha256,
    done: u64,
    /// Bytes that the file may have.
    most: u64,
    reserve: DiskReserve,
}

impl PartFile {
    /// Begins a file, or goes on with the part that an earlier transfer left.
    pub(in super::super) fn open(
        path: &Path,
        most: u64,
        reserve: &DiskReserve,
    ) -> Result<Self, Error> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        }
        let out = File::options().create(true).append(true).read(true).open(path);
        let out = out.map_err(Error::io("create", path))?;
        let (path, hasher, reserve) = (path.to_owned(), Sha256::new(), reserve.clone());
        let mut part = Self { path, out, hasher, done: 0, most, reserve };
        part.hash_what_is_there()?;
        if part.done > most {
            part.restart()?;
        }
        Ok(part)
    }

    fn hash_what_is_there(&mut self) -> Result<(), Error> {
        let mut buffer = vec![0; PIECE];
        loop {
            let n = self.out.read(&mut buffer).map_err(Error::io("read", &self.path))?;
            if n == 0 {
                return Ok(());
            }
            self.hasher.update(&buffer[..n]);
            self.done += n as u64;
        }
    }

    pub(in super::super) fn restart(&mut self) -> Result<(), Error> {
        self.out.set_len(0).map_err(Error::io("write", &self.path))?;
        (self.hasher, self.done) = (Sha256::new(), 0);
        Ok(())
    }

    /// Refuses a file of this length before it is written, if it is too long or leaves too little
    /// space.
    pub(super) fn expect(&self, length: u64) -> Result<(), SourceFailure> {
        if length > self.most {
            return Err(SourceFailure::TooLong(self.most));
        }
        let more = length.saturating_sub(self.done);
        Ok(self.reserve.check(&self.path, more).map_err(Error::from)?)
    }

    /// Bytes that are here.
    pub(super) fn done(&self) -> u64 {
        self.done
    }

    pub(super) fn is_full(&self) -> bool {
        self.done == self.most
    }

    /// Writes a stream to its end behind what is here. `report` gets the bytes so far.
    pub(super) fn append(
        &mut self,
        from: &mut dyn Read,
        report: &mut dyn FnMut(u64),
    ) -> Result<(), SourceFailure> {
        let mut buffer = vec![0; PIECE];
        loop {
            let n = from
                .read(&mut buffer)
                .map_err(|error| SourceFailure::Source(format!("reading failed: {error}")))?;
            if n == 0 {
                return Ok(());
            }
            if self.done + n as u64 > self.most {
                fs::remove_file(&self.path).map_err(Error::io("remove", &self.path))?;
                return Err(SourceFailure::TooLong(self.most));
            }
            self.reserve.check(&self.path, n as u64).map_err(Error::from)?;
            self.out.write_all(&buffer[..n]).map_err(Error::io("write", &self.path))?;
            self.hasher.update(&buffer[..n]);
            self.done += n as u64;
            report(self.done);
        }
    }

    /// Makes the file durable. Returns the digest of its content and its length.
    pub(in super::super) fn finish(self) -> Result<(String, u64), Error> {
        self.out.sync_all().map_err(Error::io("write", &self.path))?;
        Ok((hex::encode(self.hasher.finalize()), self.done))
    }
}

/// Where a file of the manifest is put together.
pub(super) fn part_of(want: &Want) -> Result<PartFile, Error> {
    PartFile::open(&part_path(want), want.file.bytes, want.folder.reserve())
}

fn part_path(want: &Want) -> PathBuf {
    want.folder.incoming().join(&want.file.name)
}

/// Writes a stream from its beginning, then moves the file to its place.
pub(super) fn receive(from: &mut dyn Read, want: &mut Want) -> Result<(), SourceFailure> {
    let mut part = part_of(want)?;
    part.restart()?;
    let path = part.path.clone();
    // Another source must not go on with it.
    part.append(from, &mut |done| want.report(done))
        .inspect_err(|_| drop(fs::remove_file(path)))?;
    place(part, want)
}

/// Moves a file to its place if its digest is the manifest's; deletes it otherwise.
pub(super) fn place(part: PartFile, want: &Want) -> Result<(), SourceFailure> {
    let ReleaseFile { name, sha256, .. } = want.file;
    let path = part.path.clone();
    let (found, _) = part.finish()?;
    if found != *sha256 {
        fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        return Err(SourceFailure::Source(format!(
            "{name} has SHA-256 {found}, the manifest says {sha256}: refused"
        )));
    }
    fs::rename(&path, want.folder.path().join(name)).map_err(Error::io("rename", &path))?;
    Ok(())
}

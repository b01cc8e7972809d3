//! The files that a restore replaces get a second name, which no later restore touches:
//! `ledger.redb.replaced-1` and `bodies.redb.replaced-1`, then 2 and so on, both files of one
//! restore under one number, and the node's own files where it is free.

use super::disk::{self, File, LockedFolder};
use crate::StoreResult;
use cresset_base::durable_file;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Gives both files of the folder, where they exist, a second name. Returns its number and the
/// names. With `halfway` the bodies are those that an interrupted restore put in place.
pub(super) fn keep(folder: &LockedFolder, halfway: bool) -> StoreResult<(u64, Vec<PathBuf>)> {
    let last = last_number(folder).map_err(|error| {
        disk::unusable(&folder.path(File::Ledger), "has a folder that cannot be listed", &error)
    })?;
    // An interrupted restore has kept these very files.
    let number = if is_kept(folder, last, halfway) { last } else { last + 1 };
    let mut kept = Vec::new();
    for file in File::ALL {
        let (path, name) = (folder.path(file), name(folder, file, number));
        if link(&path, &name).map_err(|error| {
            disk::unusable(&path, "cannot be kept aside; free space, then restore again", &error)
        })? {
            kept.push(name);
        }
    }
    Ok((number, kept))
}

/// Gives one file, if it exists, a second name with `number` or the first free one above it.
/// Returns the name.
pub(super) fn keep_file(path: &Path, number: u64) -> StoreResult<Option<PathBuf>> {
    let of = |number: u64| path.with_added_extension(format!("replaced-{number}"));
    let is_taken = |name: &PathBuf| {
        let kept = inode(name);
        kept.is_some() && kept != inode(path)
    };
    let mut name = of(number);
    for next in number + 1.. {
        if !is_taken(&name) {
            break;
        }
        name = of(next);
    }
    let linked = link(path, &name).map_err(|error| {
        disk::unusable(path, "cannot be kept aside; free space, then restore again", &error)
    })?;
    Ok(linked.then_some(name))
}

/// Which file of the machine a name stands for; `None` when there is none.
fn inode(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).map(|found| (found.dev(), found.ino())).ok()
}

fn name(folder: &LockedFolder, file: File, number: u64) -> PathBuf {
    folder.path(file).with_added_extension(format!("replaced-{number}"))
}

/// The highest number in use; 0 when there is none.
fn last_number(folder: &LockedFolder) -> io::Result<u64> {
    let mut last = 0;
    for entry in fs::read_dir(folder.dir())? {
        let found = entry?.file_name();
        let number =
            |file: File| found.to_str()?.strip_prefix(file.name())?.strip_prefix(".replaced-");
        let number = File::ALL.into_iter().find_map(number);
        last = last.max(number.and_then(|number| number.parse().ok()).unwrap_or(0));
    }
    Ok(last)
}

/// Whether the ledger is the file that is kept under `number`, and so are the bodies, if any are
/// kept there yet.
fn is_kept(folder: &LockedFolder, number: u64, halfway: bool) -> bool {
    let same = |file: File| {
        inode(&name(folder, file, number)).map(|kept| Some(kept) == inode(&folder.path(file)))
    };
    let bodies = same(File::Bodies);
    same(File::Ledger) == Some(true) && (bodies != Some(false) || halfway)
}

/// Gives a file a second name, durably. False when there is no such file.
fn link(path: &Path, name: &Path) -> io::Result<bool> {
    match fs::hard_link(path, name) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        // Only a file that `is_kept` bears the name already.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(true),
        // Some file systems have no hard links, so the file is copied.
        Err(_) => {
            let mut copy = fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(disk::OWNER_ONLY)
                .open(name)?;
            io::copy(&mut fs::File::open(path)?, &mut copy)?;
            copy.sync_all()?;
        }
    }
    durable_file::sync_name(name)?;
    Ok(true)
}

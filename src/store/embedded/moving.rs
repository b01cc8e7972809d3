//! What a move into a database needs of this backend: everything that the files hold, and the files
//! out of the way afterwards.

use super::disk::{self, Disk, File};
use super::files::{self, Files, PageCheck};
use super::snapshot::EmbeddedSnapshot;
use super::tables::OrFault;
use super::{EmbeddedConfig, tables};
use crate::backend::MoveSource;
use crate::rows::{input_of, request_of};
use crate::{StoreError, StoreResult, StoredBody};
use cresset_base::{AccountId, BootId, failpoint};
use cresset_ledger::audit::RowIter;
use cresset_ledger::{Crashes, RequestKey, StateError, StateResult};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the name of a moved file ends in.
const MOVED: &str = "moved";

impl MoveSource for EmbeddedSnapshot {
    fn last_boot(&self) -> StateResult<Option<BootId>> {
        files::last_boot(&self.ledger)
    }

    fn crashes(&self) -> RowIter<'_, (AccountId, [u8; 32], Crashes)> {
        let rows = tables::under::<Crashes>(&self.table(tables::CRASHES)?, b"")?;
        Ok(Box::new(rows.map(|row| {
            let (key, crashes) = row?;
            let (account, fingerprint) = input_of(&key).ok_or_else(|| misplaced(&key))?;
            Ok((account, fingerprint, crashes))
        })))
    }

    fn bodies(&self) -> RowIter<'_, (RequestKey, StoredBody)> {
        let rows = tables::under::<StoredBody>(&tables::open(&self.bodies, tables::BODIES)?, b"")?;
        Ok(Box::new(rows.map(|row| {
            let (key, body) = row?;
            Ok((request_of(&key).ok_or_else(|| misplaced(&key))?, body))
        })))
    }
}

fn misplaced(key: &[u8]) -> StateError {
    StateError::Corrupt(format!("it is not where it belongs, under key {}", hex::encode(key)))
}

/// `work` over everything that the ledger of a locked folder holds.
pub(crate) fn read_whole<T>(
    disk: &Arc<dyn Disk>,
    work: impl FnOnce(&dyn MoveSource) -> StoreResult<T>,
) -> StoreResult<T> {
    let files = Files::open(disk, PageCheck::Everything)?;
    work(&files.snapshot()?)
}

/// The process that used the ledger last; the other files may have been put away.
pub(crate) fn last_boot(disk: &Arc<dyn Disk>) -> StoreResult<Option<BootId>> {
    use redb::ReadableDatabase;
    let ledger = disk.open(File::Ledger, false)?;
    Ok(files::last_boot(&ledger.begin_read().or_fault()?)?)
}

/// Fails where a file of an earlier move would be written over.
pub(crate) fn check_free_names(config: &EmbeddedConfig) -> StoreResult {
    let moved = files_of(&config.dir)?.into_iter().map(|path| moved_name(&path));
    match moved.into_iter().find(|name| name.exists()) {
        None => Ok(()),
        Some(name) => Err(StoreError::Unusable(format!(
            "{} is there from an earlier move: put it elsewhere, then move this ledger",
            name.display()
        ))),
    }
}

/// Gives the files of a ledger that was moved other names, which it returns. `ledger.redb` is the
/// last one: as long as it is there, the folder counts as one with a ledger.
pub(crate) fn put_away(config: &EmbeddedConfig) -> StoreResult<Vec<PathBuf>> {
    check_free_names(config)?;
    let files = files_of(&config.dir)?;
    let kept: Vec<_> = files.iter().map(|path| moved_name(path)).collect();
    for (path, name) in files.iter().zip(&kept) {
        disk::rename(path, name)?;
        failpoint!("store::move_renamed");
    }
    Ok(kept)
}

fn moved_name(path: &Path) -> PathBuf {
    path.with_added_extension(MOVED)
}

/// The files of the folder's ledger that are there, `ledger.redb` last.
fn files_of(dir: &Path) -> StoreResult<Vec<PathBuf>> {
    let list = || -> io::Result<Vec<PathBuf>> {
        let paths = fs::read_dir(dir)?.map(|entry| entry.map(|entry| entry.path()));
        let mut found: Vec<PathBuf> = paths.collect::<io::Result<_>>()?;
        found.retain(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_one));
        found.sort_by_key(|path| path.ends_with(File::Ledger.name()));
        Ok(found)
    };
    list().map_err(|error| disk::unusable(dir, "cannot be listed", &error))
}

/// Whether this is the name of a file of a ledger.
fn is_one(name: &str) -> bool {
    let part = name.strip_prefix("journal-").and_then(|rest| rest.strip_suffix(".redb"));
    part.is_some() || File::ALL.iter().any(|file| file.name() == name)
}

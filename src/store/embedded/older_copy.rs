//! Before a folder is brought up to a newer schema, its files are copied beside it:
//! `ledger.redb.schema-N` and `bodies.redb.schema-N`. The build that wrote them can go on from
//! these.

use super::disk::{self, Disk, File, LockedFolder};
use crate::{StoreError, StoreResult};
use cresset_base::failpoint;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Bytes that stay free beside the copies, for the upgrade itself.
const MARGIN: u64 = 64 << 20;
/// Parts in which a copy is made and told.
const PARTS: u64 = 10;

/// Copies both files, unless they were copied before: an upgrade that was interrupted goes on.
pub(super) fn keep(folder: &LockedFolder, schema: u32) -> StoreResult {
    let mut missing = Vec::new();
    for file in File::ALL {
        let kept = folder.path(file).with_added_extension(format!("schema-{schema}"));
        if !kept.exists() {
            missing.push((folder.path(file), kept));
        }
    }
    check_space(folder, &missing)?;
    missing.iter().try_for_each(|(from, to)| copy(from, to))
}

fn check_space(folder: &LockedFolder, copies: &[(PathBuf, PathBuf)]) -> StoreResult {
    if copies.is_empty() {
        return Ok(());
    }
    let size = |(from, _): &(PathBuf, PathBuf)| fs::metadata(from).map_or(0, |found| found.len());
    let needed = copies.iter().map(size).sum::<u64>() + MARGIN;
    match folder.free_bytes() {
        Ok(free) if free < needed => Err(StoreError::Unusable(format!(
            "the ledger has an older format and is copied before it is changed, which needs {} MiB where {} is, and {} \
             are free: make room, then do this again; nothing was changed",
            needed.div_ceil(1 << 20),
            folder.dir().display(),
            free >> 20
        ))),
        _ => Ok(()),
    }
}

fn copy(from: &Path, to: &Path) -> StoreResult {
    let unfinished = to.with_added_extension("new");
    let failed = |error: io::Error| disk::unusable(to, disk::UNWRITTEN, &error);
    tracing::info!(copy = %to.display(), "keeping a copy of the ledger in its older format");
    let mut source = fs::File::open(from).map_err(failed)?;
    let mut target = disk::create_private(&unfinished).map_err(failed)?;
    let part = source.metadata().map_err(failed)?.len() / PARTS + 1;
    for done in 1..=PARTS {
        io::copy(&mut source.by_ref().take(part), &mut target).map_err(failed)?;
        failpoint!("store::older_copy_part");
        tracing::info!(percent = done * 100 / PARTS, "copying {}", from.display());
    }
    target.sync_all().map_err(failed)?;
    disk::rename(&unfinished, to)?;
    failpoint!("store::older_copy");
    Ok(())
}

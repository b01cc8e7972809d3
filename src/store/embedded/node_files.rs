//! The node's small files in a backup: how they get into it, and from it into a data folder.

use super::disk;
use super::set_aside;
use super::tables;
use super::tables::OrFault;
use crate::scope::{self, BackupScope, NodeFile};
use crate::{RestoreReport, StoreError, StoreResult};
use bytes::Bytes;
use cresset_ledger::StateResult;
use redb::{Database, ReadableDatabase, WriteTransaction};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Names and contents.
pub(super) type NodeFileContents = Vec<(PathBuf, Bytes)>;

/// Reads the files that a backup is to hold.
pub(super) fn read(scope: &BackupScope) -> StoreResult<NodeFileContents> {
    let BackupScope::Node(files) = scope else { return Ok(Vec::new()) };
    let read = |NodeFile { name, path }: &NodeFile| {
        let content = fs::read(path).map_err(|error| {
            disk::unusable(path, "cannot be read; change who may read it", &error)
        })?;
        Ok((name.clone(), content.into()))
    };
    files.iter().map(read).collect()
}

/// Stores the files in a backup, whose table of them may be empty.
pub(super) fn store(txn: &WriteTransaction, files: &NodeFileContents) -> StateResult {
    let mut table = txn.open_table(tables::NODE_FILES).or_fault()?;
    files.iter().try_for_each(|(name, content)| {
        tables::put(&mut table, name.to_string_lossy().as_bytes(), content)
    })
}

/// The files of a backup.
pub(super) fn of(database: &Database) -> StoreResult<NodeFileContents> {
    let txn = database.begin_read().or_fault()?;
    let table = tables::open(&txn, tables::NODE_FILES)?;
    let mut files = Vec::new();
    for row in tables::under::<Bytes>(&table, b"")? {
        let (name, content) = row?;
        let name = PathBuf::from(String::from_utf8_lossy(&name).into_owned());
        if !scope::is_allowed(&name) {
            return Err(StoreError::Unusable(format!(
                "the backup holds a file that is no part of a node, {}, and was not used",
                name.display()
            )));
        }
        files.push((name, content));
    }
    Ok(files)
}

/// Puts the files in their places under `folder`. Those that they replace are kept beside them
/// under `number`, or the next one that is free; a file with the same content stays as it is. An
/// interrupted run is completed by the next one.
pub(super) fn place(
    folder: &Path,
    files: &NodeFileContents,
    number: u64,
    report: &mut RestoreReport,
) -> StoreResult {
    for (name, content) in files {
        let path = folder.join(name);
        if fs::read(&path).is_ok_and(|found| found == **content) {
            continue;
        }
        let unfinished = path.with_added_extension("new");
        write_private(&unfinished, content).map_err(|error| {
            disk::unusable(&unfinished, "cannot be written; free space there", &error)
        })?;
        report.replaced_files.extend(set_aside::keep_file(&path, number)?);
        disk::rename(&unfinished, &path)?;
        report.restored_files.push(path);
    }
    Ok(())
}

fn write_private(path: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let mut file = disk::create_private(path)?;
    file.write_all(content)?;
    file.sync_all()
}

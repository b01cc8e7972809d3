//! Backups: a backup is one file with a consistent copy of the ledger and its tombstones, and, if
//! it is that of a node, of its answers and its small files. It is audited and sealed before it
//! gets its name, and a restore checks its seal and audits it again before it replaces anything.

use super::EmbeddedConfig;
use super::backup_seal;
use super::carry::{self, ReplacedLedger};
use super::disk::{self, File, LockedFolder};
use super::node_files;
use super::rows::{CleanMarker, FileIdentity};
use super::schema::{self, SCHEMA};
use super::set_aside;
use super::snapshot::EmbeddedSnapshot;
use super::tables::{self, Definition, OrFault, ReadOnly, Writable};
use crate::scope::{BackupScope, RestoreScope};
use crate::{RestoreReport, StoreError, StoreResult};
use cresset_base::{BootId, failpoint};
use cresset_ledger::{StateResult, audit};
use redb::{
    Database, ReadTransaction, ReadableDatabase, ReadableTable, ReadableTableMetadata,
    WriteTransaction,
};
use std::path::Path;

/// The archive is part of a backup: without it a restored node would run finished requests again.
const ARCHIVE_TABLES: [Definition; 2] = [tables::ARCHIVE, tables::ARCHIVE_DUE];

/// The answers are part of a node's backup.
const ANSWER_TABLES: [Definition; 3] = [tables::BODIES, tables::BODIES_DUE, tables::ANSWER_BYTES];

/// Copies `snapshot`, as far as `scope` says, to `to`, which must not exist.
pub(super) fn write(snapshot: &EmbeddedSnapshot, scope: &BackupScope, to: &Path) -> StoreResult {
    if to.exists() {
        return Err(StoreError::Unusable(format!(
            "{} exists: a backup never replaces another file, name a new one",
            to.display()
        )));
    }
    let unfinished = to.with_added_extension("new");
    disk::remove_leftover(&unfinished)?;
    let node_files = node_files::read(scope)?;
    let database = disk::create(&unfinished)?;
    tables::write(&database, |txn| {
        copy_all(&snapshot.ledger, txn, &tables::LEDGER_TABLES)?;
        join_journal(snapshot, txn)?;
        copy_all(&snapshot.bodies, txn, &ARCHIVE_TABLES)?;
        match scope {
            BackupScope::Ledger => tables::create(txn, &ANSWER_TABLES)?,
            BackupScope::Node(_) => copy_all(&snapshot.bodies, txn, &ANSWER_TABLES)?,
        }
        node_files::store(txn, &node_files)
    })?;
    drop(database);
    failpoint!("store::copied");
    prove(&disk::open_existing(&unfinished)?, &unfinished)?;
    failpoint!("store::proven");
    backup_seal::append(&unfinished)?;
    disk::rename(&unfinished, to)
}

/// Puts the closed parts of the journal back into one, so that a backup is one file.
fn join_journal(snapshot: &EmbeddedSnapshot, txn: &WriteTransaction) -> StateResult {
    let mut entries = txn.open_table(tables::ENTRIES).or_fault()?;
    let mut places = txn.open_table(tables::ENTRIES_BY_ACCOUNT).or_fault()?;
    let mut segments = txn.open_table(tables::SEGMENTS).or_fault()?;
    for segment in snapshot.closed_after(0)? {
        let shelf = snapshot.segments()?;
        copy_rows(&shelf.entries(&segment)?, &mut entries)?;
        copy_rows(&shelf.entries_by_account(&segment)?, &mut places)?;
        segments.remove(segment.first.to_be_bytes().as_slice()).or_fault()?;
    }
    Ok(())
}

/// Replaces a ledger that no process has open by the backup `from`, after checking the backup. The
/// replaced files are kept beside the new ones, and what was revoked or suspended in them stays so.
pub(crate) fn restore(
    config: &EmbeddedConfig,
    from: &Path,
    scope: RestoreScope,
) -> StoreResult<RestoreReport> {
    let folder = LockedFolder::lock(&config.dir)?;
    for file in File::ALL {
        // The way back from a newer build replaces its ledger.
        disk::check_schema(&folder.path(file), file, u32::MAX)?;
        disk::remove_leftover(&folder.unfinished(file))?;
    }
    let ledger = folder.unfinished(File::Ledger);
    let sealed = backup_seal::copy(from, &ledger)?;
    let database = disk::open_existing(&ledger)?;
    // An older format is named first: its backups may have no seal.
    let found = schema::upgrade(&database, &File::ALL, schema::STEPS)?;
    if !sealed {
        return Err(disk::unusable(from, "is damaged and was not used", &"it has lost its seal"));
    }
    let node_files = node_files::of(&database)?;
    prove(&database, from)?;
    let replaced = ReplacedLedger::open(&folder);
    let mut report = carry::over(&replaced, &database)?;
    report.answers = answers(&database)?;
    let epoch = found.epoch.max(replaced.epoch()) + 1;
    let halfway = replaced.is_halfway();
    drop(replaced);
    split(&database, &folder, FileIdentity { schema: SCHEMA, epoch })?;
    drop(database);
    let (number, kept) = set_aside::keep(&folder, halfway)?;
    report.replaced_files = kept;
    if scope == RestoreScope::Node {
        node_files::place(folder.dir(), &node_files, number, &mut report)?;
    }
    // The bodies first: until the ledger follows, the epochs differ and neither is opened.
    folder.finish(File::Bodies)?;
    folder.finish(File::Ledger)?;
    Ok(report)
}

/// The number of answers in a copy.
fn answers(database: &Database) -> StateResult<u64> {
    tables::open(&database.begin_read().or_fault()?, tables::BODIES)?.len().or_fault()
}

/// Moves the answers and tombstones of a restored copy into a file of their own and gives both the
/// new identity.
fn split(database: &Database, folder: &LockedFolder, identity: FileIdentity) -> StoreResult {
    let bodies = disk::create(&folder.unfinished(File::Bodies))?;
    tables::initialise(&bodies, &tables::BODIES_TABLES, identity)?;
    let source = database.begin_read().or_fault()?;
    let moved = [&ARCHIVE_TABLES[..], &ANSWER_TABLES].concat();
    tables::write(&bodies, |txn| copy_all(&source, txn, &moved))?;
    drop(source);
    tables::write(database, |txn| {
        for table in moved.into_iter().chain([tables::NODE_FILES]) {
            txn.delete_table(table).or_fault()?;
        }
        tables::set_identity(txn, identity)?;
        // The copy counts as closed. The next start releases the reservations that were open when
        // the backup was made.
        let mut meta = txn.open_table(tables::META).or_fault()?;
        // What is restored was audited as a backup; the ledger made of it is audited anew.
        meta.remove(tables::SEALED).or_fault()?;
        let clean_marker = CleanMarker { boot: BootId::generate(), clean: true };
        tables::put(&mut meta, tables::CLEAN_MARKER, &clean_marker)
    })?;
    Ok(())
}

/// Audits a backup, whose one file holds the tables of both.
fn prove(database: &Database, shown: &Path) -> StoreResult {
    let begin = || database.begin_read().or_fault();
    let snapshot = EmbeddedSnapshot { ledger: begin()?, bodies: begin()?, segments: None };
    match audit::everything(&snapshot, &audit::unpaced)?.violations.first() {
        None => Ok(()),
        Some(violation) => {
            Err(disk::unusable(shown, "fails its audit and was not used", violation))
        }
    }
}

fn copy_all(from: &ReadTransaction, to: &WriteTransaction, tables: &[Definition]) -> StateResult {
    tables.iter().try_for_each(|&table| {
        copy_rows(&tables::open(from, table)?, &mut to.open_table(table).or_fault()?)
    })
}

fn copy_rows(source: &ReadOnly, target: &mut Writable<'_>) -> StateResult {
    for pair in source.iter().or_fault()? {
        let (key, row) = pair.or_fault()?;
        target.insert(key.value(), row.value()).or_fault()?;
    }
    Ok(())
}

/// Creates an empty ledger in an existing folder; refuses where there are any files of one.
pub(crate) fn init(config: &EmbeddedConfig) -> StoreResult {
    let folder = LockedFolder::lock(&config.dir)?;
    if let Some(file) = File::ALL.into_iter().find(|&file| folder.path(file).exists()) {
        return Err(StoreError::Unusable(format!(
            "{} exists: this folder has a ledger, and it is left as it is",
            folder.path(file).display()
        )));
    }
    let identity = FileIdentity { schema: SCHEMA, epoch: 1 };
    let contents = [
        (File::Bodies, tables::BODIES_TABLES.as_slice()),
        (File::Ledger, tables::LEDGER_TABLES.as_slice()),
    ];
    for (file, tables) in contents {
        disk::remove_leftover(&folder.unfinished(file))?;
        let database = disk::create(&folder.unfinished(file))?;
        tables::initialise(&database, tables, identity)?;
    }
    contents.into_iter().try_for_each(|(file, _)| folder.finish(file))
}

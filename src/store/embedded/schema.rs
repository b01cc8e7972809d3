//! Versions of the layout of tables, keys and rows: the schemas that this build reads, and the
//! steps that bring older files up to its own.

use super::disk::{self, File};
use super::rows::FileIdentity;
use super::tables::{self, OrFault, fault};
use crate::{StoreError, StoreResult};
use cresset_base::failpoint;
use cresset_ledger::StateResult;
use redb::{Database, ReadableDatabase, WriteTransaction};
use std::panic::{self, AssertUnwindSafe};

/// Rewrites one kind of file from one schema to the next.
pub(super) type SchemaStep = fn(File, &WriteTransaction) -> StateResult;

/// The steps in order: the first one leads from schema 1 to schema 2. A released step never
/// changes.
pub(super) const STEPS: &[SchemaStep] = &[remember_periods];

/// The schema that this build writes.
pub(super) const SCHEMA: u32 = 1 + STEPS.len() as u32;

/// From schema 2 on, accounts and credentials remember the uses of several periods. Their rows are
/// read as they are. Where the time had been set back, uses of later periods were forgotten.
fn remember_periods(file: File, txn: &WriteTransaction) -> StateResult {
    if file == File::Bodies {
        return Ok(());
    }
    let mut meta = txn.open_table(tables::META).or_fault()?;
    let set_back: Option<Vec<u64>> = tables::get(&meta, tables::SET_BACK)?;
    if set_back.is_some() { tables::put(&mut meta, tables::MISSES_USES, &()) } else { Ok(()) }
}

/// Brings a database, which holds the tables of `contents`, up to the schema after the last of
/// `steps`. Each step is one transaction together with its number: an interrupted one has not
/// happened, and the next start goes on from there.
pub(super) fn upgrade(
    database: &Database,
    contents: &[File],
    steps: &[SchemaStep],
) -> StoreResult<FileIdentity> {
    let name = if let [file] = contents { file.name() } else { "the backup" };
    loop {
        let found = identity(database, name)?;
        check(found.schema, 1 + steps.len() as u32, name)?;
        let Some(step) = steps.get(found.schema as usize - 1) else {
            return Ok(found);
        };
        let schema = found.schema + 1;
        tracing::info!(name, schema, "bringing the ledger up to this build's schema");
        tables::write(database, |txn| {
            contents.iter().try_for_each(|&file| step(file, txn))?;
            tables::set_identity(txn, FileIdentity { schema, ..found })?;
            failpoint!("store::upgraded");
            Ok(())
        })?;
        tracing::info!(name, schema, "the ledger has this schema now");
    }
}

/// Refuses a schema that this build does not have.
pub(super) fn check(found: u32, known: u32, name: &str) -> StoreResult {
    if found == 0 {
        return Err(StoreError::older_format(name));
    }
    if found <= known {
        return Ok(());
    }
    Err(StoreError::Unusable(format!(
        "{name} has schema {found} and this build reads schemas 1 to {known}: a newer build has used it. It is left as it \
         is: run that build or a newer one, or restore a backup made before the update"
    )))
}

/// The identity that a file records.
pub(super) fn identity(database: &impl ReadableDatabase, name: &str) -> StoreResult<FileIdentity> {
    let damaged = |why: &dyn std::fmt::Display| {
        StoreError::Unusable(format!("{name} does not say what it is: {why}; restore a backup"))
    };
    // The pages of a file are not always checked before this, and the database panics on some
    // damaged ones.
    let found = panic::catch_unwind(AssertUnwindSafe(|| read_identity(database)))
        .map_err(|_| damaged(&disk::CONTRADICTION))?
        .map_err(|error| damaged(&error))?;
    found.ok_or_else(|| {
        StoreError::Unusable(format!(
            "{name} is a database, but no ledger: check the configured data folder"
        ))
    })
}

fn read_identity(database: &impl ReadableDatabase) -> StateResult<Option<FileIdentity>> {
    let txn = database.begin_read().or_fault()?;
    let meta = match txn.open_table(tables::META) {
        Ok(meta) => meta,
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
        Err(error) => return Err(fault(error.into())),
    };
    if meta.get(tables::OLDER_FORMAT).or_fault()?.is_some() {
        return Ok(Some(FileIdentity { schema: 0, epoch: 0 }));
    }
    tables::get(&meta, tables::FORMAT)
}

//! Versions of the layout of tables, keys and rows: the schemas that this build reads, and the
//! steps that bring older files up to its own.

use super::bodies;
use super::disk::{self, File};
use super::files;
use super::rows::{FileIdentity, GrantAlone, JournalPosition, TimelessCrashes};
use super::tables;
use crate::embedded::tables::{OrFault, fault};
use crate::{StoreError, StoreResult};
use cresset_base::failpoint;
use cresset_ledger::state::{Adjustment, Crashes, StateResult};
use redb::{Database, ReadableDatabase, ReadableTable, WriteTransaction};
use std::panic::{self, AssertUnwindSafe};

/// Rewrites one kind of file from one schema to the next.
pub(super) type SchemaStep = fn(File, &WriteTransaction) -> StateResult;

/// The steps in order: the first one leads from schema 1 to schema 2. A released step never
/// changes.
pub(super) const STEPS: &[SchemaStep] =
    &[time_crashes, sum_answers, allow_segments, allow_receipts, allow_debits, count_uses];

/// The schema that this build writes.
pub(super) const SCHEMA: u32 = 1 + STEPS.len() as u32;

/// Schema 2 gives crashes a time, so that they stop counting. Those of schema 1 get the latest time
/// stored beside them.
fn time_crashes(file: File, txn: &WriteTransaction) -> StateResult {
    if file != File::Ledger {
        return Ok(());
    }
    let meta = txn.open_table(tables::META).or_fault()?;
    let at = tables::get::<JournalPosition>(&meta, tables::PROGRESS)?.unwrap_or_default().clock;
    let mut table = txn.open_table(tables::CRASHES).or_fault()?;
    let rows: Vec<_> = tables::rows::<TimelessCrashes>(&table)?.collect::<StateResult<_>>()?;
    rows.into_iter().try_for_each(|(key, TimelessCrashes { count, boot })| {
        tables::put(&mut table, &key, &Crashes { count, boot, at })
    })
}

/// Schema 3 has the bytes of each account's answers, and answers may be compressed. The answers are
/// read once for it, which takes no longer than the check of their pages before.
fn sum_answers(file: File, txn: &WriteTransaction) -> StateResult {
    if file != File::Bodies {
        return Ok(());
    }
    let sums = bodies::sums(&txn.open_table(tables::BODIES).or_fault()?)?;
    let mut table = txn.open_table(tables::ANSWER_BYTES).or_fault()?;
    sums.into_iter().try_for_each(|(account, sum)| tables::put(&mut table, &account, &sum))
}

/// Schema 4 has a table for closed parts of the journal, and an index of answers whose every row
/// leads to one.
fn allow_segments(file: File, txn: &WriteTransaction) -> StateResult {
    if file == File::Ledger {
        return Ok(txn.open_table(tables::SEGMENTS).map(drop).or_fault()?);
    }
    let bodies = txn.open_table(tables::BODIES).or_fault()?;
    let mut index = txn.open_table(tables::BODIES_DUE).or_fault()?;
    let mut stale = Vec::new();
    for row in index.iter().or_fault()? {
        let due = row.or_fault()?.0.value().to_vec();
        if bodies.get(tables::due_subject(&due)).or_fault()?.is_none() {
            stale.push(due);
        }
    }
    stale.iter().try_for_each(|due| Ok(index.remove(due.as_slice()).map(drop).or_fault()?))
}

/// Schema 5 has answers with what their receipts are made from. Rows of earlier layouts stay until
/// they expire; the number alone keeps an older build away, which could not read the new ones.
#[expect(clippy::unnecessary_wraps, reason = "every step has this signature")]
fn allow_receipts(_: File, _: &WriteTransaction) -> StateResult {
    Ok(())
}

/// Schema 6 has debits, in the journal and among the references, which say now what they were used
/// for.
fn allow_debits(file: File, txn: &WriteTransaction) -> StateResult {
    if file != File::Ledger {
        return Ok(());
    }
    let mut table = txn.open_table(tables::GRANTS).or_fault()?;
    let rows: Vec<_> = tables::rows::<GrantAlone>(&table)?.collect::<StateResult<_>>()?;
    rows.into_iter().try_for_each(|(key, GrantAlone { bucket, units })| {
        tables::put(&mut table, &key, &Adjustment { bucket, units, is_debit: false })
    })
}

/// Schema 7 has budgets, notes and whether answers are stored, and counts what accounts and keys
/// use: from the end of the journal on. Rows of earlier layouts stay until they change.
fn count_uses(file: File, txn: &WriteTransaction) -> StateResult {
    if file != File::Ledger {
        return Ok(());
    }
    let mut meta = txn.open_table(tables::META).or_fault()?;
    let position = tables::get::<JournalPosition>(&meta, tables::PROGRESS)?.unwrap_or_default();
    tables::put(&mut meta, tables::USES_COUNTED_AFTER, &position.head.sequence)
}

/// Brings a database, which holds the tables of `contents`, up to the schema after the last of
/// `steps`. Each step is one transaction together with its number: an interrupted one has not
/// happened, and the next start goes on from there.
pub(super) fn upgrade(
    database: &Database,
    contents: &[File],
    steps: &[SchemaStep],
) -> StoreResult<FileIdentity> {
    let name = contents.first().map_or("the backup", |file| file.name());
    loop {
        let found = identity(database, name)?;
        check(found.schema, 1 + steps.len() as u32, name)?;
        let Some(step) = steps.get(found.schema as usize - 1) else {
            return Ok(found);
        };
        let schema = found.schema + 1;
        tracing::info!(name, schema, "bringing the ledger up to this build's schema");
        files::write(database, |txn| {
            contents.iter().try_for_each(|&file| step(file, txn))?;
            files::set_identity(txn, FileIdentity { schema, ..found })?;
            failpoint!("store::upgraded");
            Ok(())
        })?;
        tracing::info!(name, schema, "the ledger has this schema now");
    }
}

/// Refuses a schema that this build does not have.
pub(super) fn check(found: u32, known: u32, name: &str) -> StoreResult {
    if (1..=known).contains(&found) {
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
    match txn.open_table(tables::META) {
        Ok(meta) => tables::get(&meta, tables::IDENTITY),
        Err(redb::TableError::TableDoesNotExist(_)) => Ok(None),
        Err(error) => Err(fault(error.into())),
    }
}

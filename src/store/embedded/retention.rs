//! Retention: expired answers are deleted, ended requests move to the archive, archived ones and
//! old crashes are removed in the end. The journal stays.

use super::bodies::{self, AnswerTable};
use super::files::Files;
use super::tables::{self, OrFault, Writable, due_key, due_subject, get, put};
use crate::limits::Limits;
use cresset_base::{UnixMillis, failpoint};
use cresset_ledger::{Crashes, RequestRecord, StateResult};
use redb::{ReadableDatabase, ReadableTable, WriteTransaction};

/// Rows of one kind handled in one pass. The writer makes a pass between two batches, so this
/// bounds how long commands wait for it.
const MAX_ROWS: usize = 1_000;

/// Milliseconds by which the stored time may lag behind the clock while nothing is written.
const TIME_STEP_MS: u64 = 3_600_000;

/// Makes one pass over what is due at `now`; true when more is due.
pub(super) fn sweep(files: &Files, now: UnixMillis, limits: &Limits) -> StateResult<bool> {
    let ended = due(files, ago(now, limits.requests.replay_ms()))?;
    let purge = |txn: &WriteTransaction| -> StateResult<usize> {
        let bodies = purge_bodies(txn, now)?;
        let tombstones = purge_tombstones(txn, ago(now, limits.requests.tombstone_ms()))?;
        Ok(bodies.max(tombstones))
    };
    // The copy is durable before the original goes: a crash in between leaves both, and the next
    // pass ends it.
    let txn = bodies::begin(&files.bodies)?;
    let purged = purge(&txn)?;
    archive(&txn, &ended)?;
    if purged > 0 || !ended.is_empty() {
        failpoint!("store::before_archive");
        txn.commit().or_fault()?;
    }
    if !ended.is_empty() {
        failpoint!("store::archived");
        tables::write(&files.ledger, |txn| forget(txn, &ended))?;
        failpoint!("store::forgotten");
    }
    // A node may wait long for its first command; its next start must find that it ran until now.
    if files.stored_time()?.0.saturating_add(TIME_STEP_MS) < now.0 {
        files.set_time(now)?;
    }
    let crashes = forget_crashes(files, now, limits.requests.crash_block_ms())?;
    Ok(ended.len().max(purged).max(crashes) >= MAX_ROWS)
}

/// Removes the crashes that do not count any more. Returns how many there were.
fn forget_crashes(files: &Files, now: UnixMillis, crash_block_ms: u64) -> StateResult<usize> {
    let txn = files.ledger.begin_read().or_fault()?;
    let rows = tables::under::<Crashes>(&tables::open(&txn, tables::CRASHES)?, b"")?;
    let old = rows.filter_map(|row| match row {
        Ok((key, crashes)) => (!crashes.count_at(now, crash_block_ms)).then_some(Ok(key)),
        Err(error) => Some(Err(error)),
    });
    let old: Vec<Vec<u8>> = old.take(MAX_ROWS).collect::<StateResult<_>>()?;
    if !old.is_empty() {
        tables::write(&files.ledger, |txn| {
            let mut table = txn.open_table(tables::CRASHES).or_fault()?;
            old.iter().try_for_each(|key| table.remove(key.as_slice()).map(drop).or_fault())
        })?;
    }
    Ok(old.len())
}

/// A row of the index of ended requests, with the request if that is still its last end.
struct Ended {
    due: Vec<u8>,
    record: Option<RequestRecord>,
}

fn due(files: &Files, until: UnixMillis) -> StateResult<Vec<Ended>> {
    let txn = files.ledger.begin_read().or_fault()?;
    let requests = tables::open(&txn, tables::REQUESTS)?;
    let mut found = Vec::new();
    for due in due_keys(&tables::open(&txn, tables::ENDED)?, until)? {
        let key = due_subject(&due);
        let record: Option<RequestRecord> = get(&requests, key)?;
        let last_end = |record: &RequestRecord| {
            let at = record.latest().finished_at;
            at.is_some_and(|at| due_key(at, key) == due)
        };
        let record = record.filter(last_end);
        found.push(Ended { due, record });
    }
    Ok(found)
}

/// Keys of an index that are due, oldest first.
fn due_keys(
    index: &impl ReadableTable<&'static [u8], &'static [u8]>,
    until: UnixMillis,
) -> StateResult<Vec<Vec<u8>>> {
    let until = until.0.saturating_add(1).to_be_bytes();
    let due = index.range(..until.as_slice()).or_fault()?.take(MAX_ROWS);
    due.map(|pair| Ok(pair.or_fault()?.0.value().to_vec())).collect()
}

fn archive(txn: &WriteTransaction, ended: &[Ended]) -> StateResult {
    let mut archive = txn.open_table(tables::ARCHIVE).or_fault()?;
    let mut index = txn.open_table(tables::ARCHIVE_DUE).or_fault()?;
    for Ended { due, record } in ended {
        if let Some(record) = record {
            put(&mut archive, due_subject(due), record)?;
            put(&mut index, due, &())?;
        }
    }
    Ok(())
}

fn forget(txn: &WriteTransaction, ended: &[Ended]) -> StateResult {
    let mut requests = txn.open_table(tables::REQUESTS).or_fault()?;
    let mut index = txn.open_table(tables::ENDED).or_fault()?;
    for Ended { due, record } in ended {
        if record.is_some() {
            requests.remove(due_subject(due)).or_fault()?;
        }
        index.remove(due.as_slice()).or_fault()?;
    }
    Ok(())
}

fn purge_bodies(txn: &WriteTransaction, now: UnixMillis) -> StateResult<usize> {
    let mut answers = AnswerTable::open(txn)?;
    purge(&mut txn.open_table(tables::BODIES_DUE).or_fault()?, now, |_, key| {
        // A later attempt may have stored another body that expires later.
        match answers.get(key)? {
            Some(body) if body.expires_at <= now => answers.remove(key),
            _ => Ok(()),
        }
    })
}

fn purge_tombstones(txn: &WriteTransaction, until: UnixMillis) -> StateResult<usize> {
    let mut archive = txn.open_table(tables::ARCHIVE).or_fault()?;
    purge(&mut txn.open_table(tables::ARCHIVE_DUE).or_fault()?, until, |due, key| {
        let record: Option<RequestRecord> = get(&archive, key)?;
        // The id may have been used anew since, and archived again.
        let at = record.and_then(|record| record.latest().finished_at);
        if at.is_some_and(|at| due_key(at, key) == due) {
            archive.remove(key).or_fault()?;
        }
        Ok(())
    })
}

/// Handles every due row of an index and removes it from there. Returns how many there were.
fn purge(
    index: &mut Writable<'_>,
    until: UnixMillis,
    mut handle: impl FnMut(&[u8], &[u8]) -> StateResult,
) -> StateResult<usize> {
    let due = due_keys(index, until)?;
    for key in &due {
        handle(key, due_subject(key))?;
        index.remove(key.as_slice()).or_fault()?;
    }
    Ok(due.len())
}

/// The time `span_ms` before `now`, or 0 where that would be before 1970.
fn ago(now: UnixMillis, span_ms: u64) -> UnixMillis {
    UnixMillis(now.0.saturating_sub(span_ms))
}

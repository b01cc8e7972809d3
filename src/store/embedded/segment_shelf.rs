//! The closed parts of a journal as readers find them.

use super::disk::Disk;
use super::tables::{self, OrFault, ReadOnly};
use cresset_ledger::{JournalEntry, JournalHead, StateError, StateResult};
use parking_lot::Mutex;
use redb::{AccessGuard, ReadTransaction, ReadableDatabase, ReadableTable};
use std::fmt;
use std::sync::Arc;

/// Segments kept open. Statements and audits go through them in order.
const MAX_OPEN: usize = 4;

/// A closed part of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// The sequence of its first entry.
    pub first: u64,
    /// Its last entry.
    pub last: JournalHead,
}

/// The name of its file.
impl fmt::Display for Segment {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "journal-{:012}-{}.redb", self.first, hex::encode(self.last.hash))
    }
}

impl Segment {
    pub(super) fn contains(&self, sequence: u64) -> bool {
        (self.first..=self.last.sequence).contains(&sequence)
    }

    pub(super) fn damaged(&self, how: &dyn fmt::Display) -> StateError {
        StateError::Corrupt(format!("{self}, a closed part of the journal, {how}"))
    }
}

/// The closed parts of a ledger's journal, and those that are being closed.
pub(super) struct SegmentShelf {
    pub disk: Arc<dyn Disk>,
    /// Segments that were read last, the latest at the end.
    open: Mutex<Vec<(Segment, Arc<ReadTransaction>)>>,
    /// A finished one that the ledger does not know yet.
    pub finished: Mutex<Option<Segment>>,
    /// Entries of one segment.
    pub length: u64,
}

impl SegmentShelf {
    pub(super) fn new(disk: Arc<dyn Disk>) -> Self {
        let length = disk.segment_entries();
        Self { disk, open: Mutex::default(), finished: Mutex::default(), length }
    }

    /// A reading of the segment. Its file is opened where it is not open already.
    fn read(&self, segment: &Segment) -> StateResult<Arc<ReadTransaction>> {
        let mut open = self.open.lock();
        if let Some(place) = open.iter().position(|(found, _)| found == segment) {
            let found = open.remove(place);
            let txn = Arc::clone(&found.1);
            open.push(found);
            return Ok(txn);
        }
        let database = self
            .disk
            .open_segment(&segment.to_string())
            .map_err(|error| segment.damaged(&error))?;
        let txn = Arc::new(database.begin_read().or_fault()?);
        if open.len() >= MAX_OPEN {
            open.remove(0);
        }
        open.push((*segment, Arc::clone(&txn)));
        Ok(txn)
    }

    pub(super) fn entries(&self, segment: &Segment) -> StateResult<ReadOnly> {
        tables::open(&*self.read(segment)?, tables::ENTRIES)
    }

    pub(super) fn entries_by_account(&self, segment: &Segment) -> StateResult<ReadOnly> {
        tables::open(&*self.read(segment)?, tables::ENTRIES_BY_ACCOUNT)
    }

    /// Checks that the segment's file is there and ends as it should.
    pub(super) fn check(&self, segment: &Segment) -> StateResult {
        let entries = self.entries(segment)?;
        let Segment { first, last } = *segment;
        let ends =
            (sequence_of(entries.first().or_fault()?), sequence_of(entries.last().or_fault()?));
        let found: Option<JournalEntry> = tables::get(&entries, &last.sequence.to_be_bytes())?;
        let whole = ends == (Some(first), Some(last.sequence))
            && found.is_some_and(|found| found.hash == last.hash);
        if whole { Ok(()) } else { Err(segment.damaged(&"is not what it was when it was closed")) }
    }
}

/// The sequence of an entry as a table gave it.
fn sequence_of(
    row: Option<(AccessGuard<'_, &'static [u8]>, AccessGuard<'_, &'static [u8]>)>,
) -> Option<u64> {
    row.and_then(|(key, _)| key.value().first_chunk().copied()).map(u64::from_be_bytes)
}

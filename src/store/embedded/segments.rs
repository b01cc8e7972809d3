//! Closed parts of the journal. A part that a seal covers is copied into a file of its own, which
//! never changes again, and its rows leave `ledger.redb`. So that file's size follows retention and
//! not history.
//!
//! A segment's name holds the hash of its last entry, which every entry before it leads to: two
//! ledgers have a segment in common exactly where they have the history in common. So no restore
//! can make two files want one name, and none is ever deleted or written over.

use super::files::Files;
use super::rows::FileIdentity;
use super::schema::SCHEMA;
use super::segment_shelf::{Segment, SegmentShelf};
use super::snapshot::EmbeddedSnapshot;
use super::tables::{self, OrFault};
use crate::StoreResult;
use cresset_base::failpoint;
use cresset_ledger::audit::{AuditPace, AuditProgress, AuditSource, JournalChain};
use cresset_ledger::{JournalEntry, JournalHead, StateError, StateResult, journal};
use redb::{ReadTransaction, ReadableDatabase, ReadableTableMetadata, WriteTransaction};

/// Live entries removed in one pass, after their segment was registered.
const MAX_TRIMMED: usize = 1_000;
/// Entries copied from one snapshot. Entries never change, and pages that the writer frees cannot
/// be used again while an older snapshot is held: the live file would grow.
const VIEW_ENTRIES: u64 = 4_096;

impl SegmentShelf {
    /// Copies the oldest live entries into a segment, when there are enough that the seal covers.
    /// True when it did; the writer then registers it.
    pub(super) fn close_one(
        &self,
        views: &dyn Fn() -> StateResult<EmbeddedSnapshot>,
        pace: AuditPace<'_>,
    ) -> StoreResult<bool> {
        if self.finished.lock().is_some() {
            return Ok(false);
        }
        let Some((before, segment)) = self.next(&views()?)? else {
            return Ok(false);
        };
        let name = segment.to_string();
        let database = self.disk.create_segment(&name)?;
        tables::write(&database, |txn| self.fill(views, &segment, txn, pace))?;
        drop(database);
        failpoint!("store::segment_written");
        let copied = self.disk.open_unfinished_segment(&name)?.begin_read();
        prove(&copied.or_fault()?, before, &segment, pace)?;
        self.disk.finish_segment(&name)?;
        failpoint!("store::segment_finished");
        *self.finished.lock() = Some(segment);
        Ok(true)
    }

    /// The next segment to close, and the entry before it.
    fn next(&self, view: &EmbeddedSnapshot) -> StateResult<Option<(JournalHead, Segment)>> {
        let before = view.last_closed()?.map_or(JournalHead::default(), |segment| segment.last);
        let last = before.sequence + self.length;
        let enough = view.head()?.sequence >= last + self.length
            && view.sealed_head()?.is_some_and(|sealed| sealed.sequence >= last);
        if !enough {
            return Ok(None);
        }
        let found = AuditSource::entry(view, JournalChain::Shared, last)?.ok_or_else(|| {
            StateError::Corrupt(format!("entry {last} of the journal is not there"))
        })?;
        let last = JournalHead { sequence: last, hash: found.hash };
        Ok(Some((before, Segment { first: before.sequence + 1, last })))
    }

    fn fill(
        &self,
        views: &dyn Fn() -> StateResult<EmbeddedSnapshot>,
        segment: &Segment,
        txn: &WriteTransaction,
        pace: AuditPace<'_>,
    ) -> StateResult {
        tables::create(txn, &[tables::META, tables::ENTRIES, tables::ENTRIES_BY_ACCOUNT])?;
        // The schema says how its rows are laid out; a segment belongs to every epoch.
        tables::set_identity(txn, FileIdentity { schema: SCHEMA, epoch: 0 })?;
        let mut entries = txn.open_table(tables::ENTRIES).or_fault()?;
        let mut places = txn.open_table(tables::ENTRIES_BY_ACCOUNT).or_fault()?;
        let mut source = views()?.table(tables::ENTRIES)?;
        for sequence in segment.first..=segment.last.sequence {
            if sequence % VIEW_ENTRIES == 0 {
                source = views()?.table(tables::ENTRIES)?;
            }
            pace(AuditProgress { done: sequence - segment.first, total: self.length })?;
            let key = sequence.to_be_bytes();
            let missing = || StateError::Corrupt(format!("entry {sequence} is not there"));
            let entry: JournalEntry = tables::get(&source, &key)?.ok_or_else(missing)?;
            tables::put(&mut entries, &key, &entry)?;
            tables::put(&mut places, &tables::entry_key(entry.account, sequence), &())?;
        }
        Ok(())
    }
}

/// Checks that a copied segment is one chain from `before` to its last entry.
fn prove(
    copied: &ReadTransaction,
    before: JournalHead,
    segment: &Segment,
    pace: AuditPace<'_>,
) -> StateResult {
    let entries = tables::open(copied, tables::ENTRIES)?;
    let places = tables::open(copied, tables::ENTRIES_BY_ACCOUNT)?;
    let total = entries.len().or_fault()?;
    let mut head = before;
    for row in tables::under::<JournalEntry>(&entries, b"")? {
        pace(AuditProgress { done: head.sequence - before.sequence, total })?;
        let (_, entry) = row?;
        let place = tables::entry_key(entry.account, entry.sequence);
        let follows = entry.sequence == head.sequence + 1
            && entry.hash == journal::chain(&head, &entry)
            && tables::get::<()>(&places, &place)?.is_some();
        if !follows {
            return Err(segment.damaged(&format!("breaks at entry {}", entry.sequence)));
        }
        head = JournalHead { sequence: entry.sequence, hash: entry.hash };
    }
    let whole = head == segment.last && places.len().or_fault()? == total;
    if whole { Ok(()) } else { Err(segment.damaged(&"is not whole")) }
}

/// Makes one pass over closed parts: registers a finished one, and removes rows of registered ones
/// that are still live. True when more is due.
pub(super) fn sweep(files: &Files) -> StateResult<bool> {
    if let Some(segment) = files.segments.finished.lock().take() {
        tables::write(&files.ledger, |txn| {
            let mut segments = txn.open_table(tables::SEGMENTS).or_fault()?;
            tables::put(&mut segments, &segment.first.to_be_bytes(), &segment.last)
        })?;
        failpoint!("store::segment_registered");
        tracing::info!(%segment, "closed a part of the journal");
        return Ok(true);
    }
    let Some(closed) = files.snapshot()?.last_closed()? else {
        return Ok(false);
    };
    let until = (closed.last.sequence + 1).to_be_bytes();
    let txn = files.ledger.begin_read().or_fault()?;
    let live = tables::open(&txn, tables::ENTRIES)?;
    let rows = live.range::<&[u8]>(..until.as_slice()).or_fault()?.take(MAX_TRIMMED);
    let left: Vec<Vec<u8>> =
        rows.map(|row| Ok(row.or_fault()?.0.value().to_vec())).collect::<StateResult<_>>()?;
    if left.is_empty() {
        return Ok(false);
    }
    tables::write(&files.ledger, |txn| {
        let mut entries = txn.open_table(tables::ENTRIES).or_fault()?;
        let mut places = txn.open_table(tables::ENTRIES_BY_ACCOUNT).or_fault()?;
        for key in &left {
            let entry: Option<JournalEntry> = tables::get(&entries, key)?;
            if let Some(entry) = entry {
                places
                    .remove(tables::entry_key(entry.account, entry.sequence).as_slice())
                    .or_fault()?;
            }
            entries.remove(key.as_slice()).or_fault()?;
        }
        Ok(())
    })?;
    failpoint!("store::segment_trimmed");
    Ok(left.len() >= MAX_TRIMMED)
}

impl EmbeddedSnapshot {
    pub(super) fn segments(&self) -> StateResult<&SegmentShelf> {
        let none = || StateError::Corrupt("a backup has no closed parts of the journal".into());
        self.segments.as_deref().ok_or_else(none)
    }

    /// The registered segments whose last entry comes after `sequence`, in order.
    pub(super) fn closed_after(&self, sequence: u64) -> StateResult<Vec<Segment>> {
        let rows = tables::under::<JournalHead>(&self.table(tables::SEGMENTS)?, b"")?;
        let segments = rows.map(|row| row.map(|(first, last)| segment(&first, last)));
        let later = |found: &StateResult<Segment>| {
            found.as_ref().map_or(true, |segment| segment.last.sequence > sequence)
        };
        segments.filter(later).collect()
    }

    /// The last segment that is registered.
    pub(super) fn last_closed(&self) -> StateResult<Option<Segment>> {
        self.last_closed_until(u64::MAX)
    }

    /// The last registered segment that begins at `sequence` or before it.
    fn last_closed_until(&self, sequence: u64) -> StateResult<Option<Segment>> {
        let table = self.table(tables::SEGMENTS)?;
        let (first, until) = (0_u64.to_be_bytes(), sequence.to_be_bytes());
        let Some(row) = table.range(first.as_slice()..=until.as_slice()).or_fault()?.next_back()
        else {
            return Ok(None);
        };
        let (key, stored) = row.or_fault()?;
        let last = crate::codec::decode(key.value(), stored.value())?;
        Ok(Some(segment(key.value(), last)))
    }

    /// The registered segment that an entry lies in; `None` for a live one.
    pub(super) fn closed_with(&self, sequence: u64) -> StateResult<Option<Segment>> {
        let found = self.last_closed_until(sequence)?;
        Ok(found.filter(|segment| segment.contains(sequence)))
    }
}

fn segment(first: &[u8], last: JournalHead) -> Segment {
    let first = first.first_chunk().copied().unwrap_or_default();
    Segment { first: u64::from_be_bytes(first), last }
}

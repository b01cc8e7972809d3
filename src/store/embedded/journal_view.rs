//! The journal of a snapshot: closed segments and live entries, read as one. What is registered as
//! closed is read from its segment, so live rows that were not removed yet do not matter.

use super::rows::{JournalPosition, SealedPosition};
use super::segment_shelf::Segment;
use super::snapshot::EmbeddedSnapshot;
use super::tables::{self, OrFault, ReadOnly, get};
use cresset_base::AccountId;
use cresset_ledger::{JournalEntry, JournalHead, StateError, StateResult};
use std::iter;
use std::ops::Bound;

type Entries<'a> = Box<dyn Iterator<Item = StateResult<JournalEntry>> + 'a>;

impl EmbeddedSnapshot {
    /// The recorded end of the journal.
    pub(super) fn head(&self) -> StateResult<JournalHead> {
        let position: Option<JournalPosition> = self.row(tables::META, tables::PROGRESS)?;
        Ok(position.unwrap_or_default().head)
    }

    pub(super) fn sealed_head(&self) -> StateResult<Option<JournalHead>> {
        let sealed: Option<SealedPosition> = self.row(tables::META, tables::SEALED)?;
        Ok(sealed.map(|sealed| sealed.head))
    }

    pub(super) fn journal_entry(&self, sequence: u64) -> StateResult<Option<JournalEntry>> {
        let key = sequence.to_be_bytes();
        match self.closed_with(sequence)? {
            Some(segment) => get(&self.segments()?.entries(&segment)?, &key),
            None => self.row(tables::ENTRIES, &key),
        }
    }

    /// The entries after a sequence, each checked against its place in the index by account.
    pub(super) fn journal_after(&self, sequence: u64) -> StateResult<Entries<'_>> {
        let closed = self.closed_after(sequence)?;
        let live_after = closed.last().map_or(sequence, |segment| segment.last.sequence);
        let read = move |segment: Segment| -> Entries<'_> {
            let open = || -> StateResult<_> {
                let shelf = self.segments()?;
                let places = shelf.entries_by_account(&segment)?;
                in_place(&shelf.entries(&segment)?, places, sequence)
            };
            match open() {
                Ok(entries) => Box::new(entries),
                Err(error) => Box::new(iter::once(Err(error))),
            }
        };
        let places = self.table(tables::ENTRIES_BY_ACCOUNT)?;
        let live = in_place(&self.table(tables::ENTRIES)?, places, live_after)?;
        Ok(Box::new(closed.into_iter().flat_map(read).chain(live)))
    }

    /// The sequence of an account's last entry up to `until`, closed ones only with `closed`.
    pub(super) fn last_of(
        &self,
        account: AccountId,
        until: u64,
        closed: bool,
    ) -> StateResult<Option<u64>> {
        let end = self.last_closed()?.map_or(0, |segment| segment.last.sequence);
        let live = self.table(tables::ENTRIES_BY_ACCOUNT)?;
        let found = last_place(&live, account, end + 1, until)?;
        if found.is_some() || !closed {
            return Ok(found);
        }
        let segments = self.closed_after(0)?;
        for segment in segments.iter().rev().filter(|segment| segment.first <= until) {
            let places = self.segments()?.entries_by_account(segment)?;
            if let Some(found) = last_place(&places, account, segment.first, until)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Up to `limit` entries of an account after a sequence.
    pub(super) fn entries_of(
        &self,
        account: AccountId,
        after: u64,
        limit: usize,
    ) -> StateResult<Vec<JournalEntry>> {
        let mut found = Vec::new();
        let mut after = after;
        for segment in self.closed_after(after)? {
            let shelf = self.segments()?;
            let places = shelf.entries_by_account(&segment)?;
            let entries = shelf.entries(&segment)?;
            collect(&places, &entries, account, after, limit, &mut found)?;
            after = after.max(segment.last.sequence);
            if found.len() >= limit {
                return Ok(found);
            }
        }
        let places = self.table(tables::ENTRIES_BY_ACCOUNT)?;
        collect(&places, &self.table(tables::ENTRIES)?, account, after, limit, &mut found)?;
        Ok(found)
    }
}

/// Adds an account's entries after a sequence until there are `limit`.
fn collect(
    places: &ReadOnly,
    entries: &ReadOnly,
    account: AccountId,
    after: u64,
    limit: usize,
    found: &mut Vec<JournalEntry>,
) -> StateResult {
    let (from, to) = (tables::entry_key(account, after), tables::entry_key(account, u64::MAX));
    let bounds = (Bound::Excluded(&from[..]), Bound::Included(&to[..]));
    for place in tables::range::<()>(places, bounds)?.take(limit.saturating_sub(found.len())) {
        let (place, ()) = place?;
        found.extend(get::<JournalEntry>(entries, place.get(16..).unwrap_or_default())?);
    }
    Ok(())
}

/// The last place of an account between two sequences.
fn last_place(
    places: &ReadOnly,
    account: AccountId,
    from: u64,
    until: u64,
) -> StateResult<Option<u64>> {
    if from > until {
        return Ok(None);
    }
    let (first, last) = (tables::entry_key(account, from), tables::entry_key(account, until));
    let Some(place) = places.range(first.as_slice()..=last.as_slice()).or_fault()?.next_back()
    else {
        return Ok(None);
    };
    let sequence = place.or_fault()?.0.value().last_chunk().copied().unwrap_or_default();
    Ok(Some(u64::from_be_bytes(sequence)))
}

/// The entries of a table after a sequence. One that is not where it belongs is damaged.
fn in_place(
    entries: &ReadOnly,
    places: ReadOnly,
    after: u64,
) -> StateResult<impl Iterator<Item = StateResult<JournalEntry>> + use<>> {
    let from = after.to_be_bytes();
    let rows = tables::range(entries, (Bound::Excluded(&from[..]), Bound::Unbounded))?;
    Ok(rows.map(move |row| {
        let (key, entry): (Vec<u8>, JournalEntry) = row?;
        let place = get::<()>(&places, &tables::entry_key(entry.account, entry.sequence))?;
        let right = entry.sequence.to_be_bytes() == *key && place.is_some();
        right.then_some(entry).ok_or_else(|| {
            StateError::Corrupt(format!("entry {} is not where it belongs", hex::encode(key)))
        })
    }))
}

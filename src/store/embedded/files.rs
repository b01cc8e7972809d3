//! The open databases and the epoch that makes them one ledger.

use super::disk::{Disk, File};
use super::rows::{CleanMarker, FileIdentity, JournalPosition, SealedPosition};
use super::schema::{self, SchemaStep};
use super::segment_shelf::SegmentShelf;
use super::tables::{self, OrFault, Writable};
use crate::codec::StoredField;
use crate::{StoreError, StoreResult};
use cresset_base::{BootId, UnixMillis, failpoint};
use cresset_ledger::StateResult;
use redb::{Database, ReadTransaction, ReadableDatabase};
use std::sync::Arc;

/// Which pages are checked when a ledger is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageCheck {
    /// Those of both files.
    Everything,
    /// Those of `ledger.redb`. The other file grows with retention, each of its commits is whole
    /// whatever happens after it, and the audit of everything reads its rows. Its pages are checked
    /// by every second start after a stop that was not orderly: damage of them may be what ends
    /// each process.
    LedgerUnlessDoubted,
}

pub(super) struct Files {
    pub ledger: Database,
    pub bodies: Database,
    pub segments: Arc<SegmentShelf>,
}

impl Files {
    pub(super) fn open(disk: &Arc<dyn Disk>, pages: PageCheck) -> StoreResult<Self> {
        let files = Self::open_as_they_are(disk, pages)?;
        files.upgrade(schema::STEPS)?;
        Ok(files)
    }

    /// Brings both files up to the schema after the last of `steps`. The bodies go first, so a
    /// ledger with the new schema is never opened beside older bodies.
    pub(super) fn upgrade(&self, steps: &[SchemaStep]) -> StoreResult {
        schema::upgrade(&self.bodies, &[File::Bodies], steps)?;
        failpoint!("store::bodies_upgraded");
        schema::upgrade(&self.ledger, &[File::Ledger], steps).map(drop)
    }

    fn open_as_they_are(disk: &Arc<dyn Disk>, pages: PageCheck) -> StoreResult<Self> {
        let ledger = disk.open(File::Ledger, true)?;
        let FileIdentity { schema, epoch } = schema::identity(&ledger, File::Ledger.name())?;
        // Before the other file is opened, which may write to it.
        schema::check(schema, schema::SCHEMA, File::Ledger.name())?;
        let check_bodies = pages == PageCheck::Everything
            || (was_left_open(&ledger)? && meta::<BootId>(&ledger, tables::UNCHECKED)?.is_some());
        let bodies = disk.open(File::Bodies, check_bodies)?;
        let segments = Arc::new(SegmentShelf::new(Arc::clone(disk)));
        let files = Self { ledger, bodies, segments };
        if schema::identity(&files.bodies, File::Bodies.name())?.epoch != epoch {
            return Err(StoreError::Unusable(
                "ledger.redb and bodies.redb do not belong together: a restore was interrupted; run it again".into(),
            ));
        }
        Ok(files)
    }

    pub(super) fn stored_time(&self) -> StateResult<UnixMillis> {
        let position = meta(&self.ledger, tables::PROGRESS)?;
        Ok(position.map_or(UnixMillis::default(), |position: JournalPosition| position.clock))
    }

    /// Makes `now` the latest time stored. Where that sets it back, the last entry is recorded,
    /// after which entries may begin at an earlier time.
    pub(super) fn set_time(&self, now: UnixMillis) -> StateResult {
        tables::write(&self.ledger, |txn| {
            let mut meta = txn.open_table(tables::META).or_fault()?;
            let position: JournalPosition =
                tables::get(&meta, tables::PROGRESS)?.unwrap_or_default();
            if now < position.clock {
                let mut steps: Vec<u64> = tables::get(&meta, tables::SET_BACK)?.unwrap_or_default();
                steps.push(position.head.sequence);
                tables::put(&mut meta, tables::SET_BACK, &steps)?;
            }
            let position = JournalPosition { clock: now, ..position };
            tables::put(&mut meta, tables::PROGRESS, &position)
        })
    }

    /// Whether the last process that used the ledger did not stop in good order.
    pub(super) fn was_left_open(&self) -> StateResult<bool> {
        was_left_open(&self.ledger)
    }

    pub(super) fn seal(&self) -> StateResult<Option<SealedPosition>> {
        meta(&self.ledger, tables::SEALED)
    }

    pub(super) fn set_seal(&self, seal: Option<SealedPosition>) -> StateResult {
        tables::write(&self.ledger, |txn| {
            let mut meta = txn.open_table(tables::META).or_fault()?;
            match seal {
                Some(seal) => tables::put(&mut meta, tables::SEALED, &seal),
                None => Ok(meta.remove(tables::SEALED).map(drop).or_fault()?),
            }
        })
    }

    /// Records that the process `boot` uses the ledger, and whether this start checked every page.
    pub(super) fn set_in_use(&self, boot: BootId) -> StateResult {
        let doubted = self.was_left_open()?;
        set_clean_marker(&self.ledger, CleanMarker { boot, clean: false }, |meta| {
            let known = meta.remove(tables::UNCHECKED).or_fault()?.is_some();
            if doubted && !known { tables::put(meta, tables::UNCHECKED, &boot) } else { Ok(()) }
        })
    }

    /// Closes the files and records that the process `boot` stopped in good order. The bodies are
    /// closed first: that writes to their file, and where the database panics the stop was not
    /// orderly.
    pub(super) fn close(self, boot: BootId) -> StateResult {
        let Self { ledger, bodies, .. } = self;
        drop(bodies);
        set_clean_marker(&ledger, CleanMarker { boot, clean: true }, |_| Ok(()))
    }
}

/// The process that used the ledger last.
pub(super) fn last_boot(ledger: &ReadTransaction) -> StateResult<Option<BootId>> {
    let last = tables::get(&tables::open(ledger, tables::META)?, tables::CLEAN_MARKER)?;
    Ok(last.map(|last: CleanMarker| last.boot))
}

fn was_left_open(ledger: &Database) -> StateResult<bool> {
    let last: Option<CleanMarker> = meta(ledger, tables::CLEAN_MARKER)?;
    Ok(last.is_some_and(|last| !last.clean))
}

fn meta<T: StoredField>(ledger: &Database, key: &[u8]) -> StateResult<Option<T>> {
    let txn = ledger.begin_read().or_fault()?;
    tables::get(&tables::open(&txn, tables::META)?, key)
}

fn set_clean_marker(
    ledger: &Database,
    marker: CleanMarker,
    with: impl FnOnce(&mut Writable<'_>) -> StateResult,
) -> StateResult {
    tables::write(ledger, |txn| {
        let mut meta = txn.open_table(tables::META).or_fault()?;
        with(&mut meta)?;
        tables::put(&mut meta, tables::CLEAN_MARKER, &marker)
    })
}

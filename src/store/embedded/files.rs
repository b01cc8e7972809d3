//! The two open databases and the epoch that makes them one ledger.

use super::disk::{Disk, File};
use super::rows::{CleanMarker, FileIdentity, JournalPosition};
use super::schema;
use super::snapshot::EmbeddedSnapshot;
use super::tables::{self, Definition};
use crate::clock::UnixMillis;
use crate::ids::BootId;
use crate::ledger::state::StateResult;
use crate::store::{StoreError, StoreResult};
use redb::{Database, ReadableDatabase, WriteTransaction};

pub(super) struct Files {
    pub ledger: Database,
    pub bodies: Database,
}

impl Files {
    pub(super) fn open(disk: &dyn Disk) -> StoreResult<Self> {
        let files = Self { ledger: disk.open(File::Ledger)?, bodies: disk.open(File::Bodies)? };
        let epoch = |database, file| {
            Ok::<_, StoreError>(schema::identity(database, File::name(file))?.epoch)
        };
        if epoch(&files.ledger, File::Ledger)? != epoch(&files.bodies, File::Bodies)? {
            return Err(StoreError::Unusable(
                "ledger.redb and bodies.redb do not belong together: a restore was interrupted; run it again".into(),
            ));
        }
        schema::upgrade(&files.bodies, &[File::Bodies], schema::STEPS)?;
        schema::upgrade(&files.ledger, &[File::Ledger], schema::STEPS)?;
        Ok(files)
    }

    pub(super) fn snapshot(&self) -> StateResult<EmbeddedSnapshot> {
        // The ledger is read first, so that a request on its way to the archive is seen in at least
        // one of the two files.
        let ledger = self.ledger.begin_read()?;
        let bodies = self.bodies.begin_read()?;
        Ok(EmbeddedSnapshot { ledger, bodies })
    }

    pub(super) fn stored_time(&self) -> StateResult<UnixMillis> {
        let txn = self.ledger.begin_read()?;
        let position = tables::get(&tables::open(&txn, tables::META)?, tables::PROGRESS)?;
        Ok(position.map_or(UnixMillis::default(), |position: JournalPosition| position.clock))
    }

    /// Makes `now` the latest time stored. Where that sets it back, the last entry is recorded,
    /// after which entries may begin at an earlier time.
    pub(super) fn set_time(&self, now: UnixMillis) -> StateResult {
        write(&self.ledger, |txn| {
            let mut meta = txn.open_table(tables::META)?;
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

    pub(super) fn clean_marker(&self) -> StateResult<Option<CleanMarker>> {
        let txn = self.ledger.begin_read()?;
        tables::get(&tables::open(&txn, tables::META)?, tables::CLEAN_MARKER)
    }

    /// Records that the process `boot` uses the ledger or, with `clean`, that it stopped in good
    /// order.
    pub(super) fn set_clean_marker(&self, boot: BootId, clean: bool) -> StateResult {
        let clean_marker = CleanMarker { boot, clean };
        write(&self.ledger, |txn| {
            let mut meta = txn.open_table(tables::META)?;
            tables::put(&mut meta, tables::CLEAN_MARKER, &clean_marker)
        })
    }
}

/// Gives an empty database its tables and identity.
pub(super) fn initialise(
    database: &Database,
    tables: &[Definition],
    identity: FileIdentity,
) -> StateResult {
    write(database, |txn| {
        tables::create(txn, tables)?;
        set_identity(txn, identity)
    })
}

pub(super) fn set_identity(txn: &WriteTransaction, identity: FileIdentity) -> StateResult {
    let mut meta = txn.open_table(tables::META)?;
    tables::put(&mut meta, tables::IDENTITY, &identity)
}

/// One durable transaction, abandoned when `change` fails.
pub(super) fn write(
    database: &Database,
    change: impl FnOnce(&WriteTransaction) -> StateResult,
) -> StateResult {
    let txn = database.begin_write()?;
    change(&txn)?;
    Ok(txn.commit()?)
}

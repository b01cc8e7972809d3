//! A simulated disk: writes that were not synced may be lost, torn or kept when the power goes, and
//! any operation can be made to fail. Everything is decided by a seed.

use super::super::disk::{Disk, File, SEGMENT_ENTRIES};
use super::super::rows::FileIdentity;
use super::super::schema;
use super::super::tables::{self, BODIES_TABLES, LEDGER_TABLES};
use super::{TestClock, opening};
use crate::{Limits, LockedPlace, LockedStore, OpenProgress, Store, StoreError, StoreResult};
use cresset_ledger::StateResult;
use redb::{Builder, Database, ReadOnlyDatabase, StorageBackend, WriteTransaction};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

const SECTOR: usize = 512;

/// Small numbers from a seed (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

#[derive(Clone, Debug)]
enum Change {
    Write(usize, Vec<u8>),
    SetLen(usize),
}

/// One file: its synced content, and the changes since.
#[derive(Debug, Default)]
struct Media {
    synced: Vec<u8>,
    seen: Vec<u8>,
    unsynced: Vec<Change>,
}

impl Media {
    fn change(&mut self, change: Change) {
        perform(&mut self.seen, &change);
        self.unsynced.push(change);
    }

    fn sync(&mut self) {
        self.synced.clone_from(&self.seen);
        self.unsynced.clear();
    }

    /// Keeps, loses or tears every change since the last sync, independently of later ones.
    fn lose_power(&mut self, random: &mut Random) {
        for change in std::mem::take(&mut self.unsynced) {
            match random.below(3) {
                0 => perform(&mut self.synced, &change),
                1 => tear(&mut self.synced, &change, random),
                _ => {}
            }
        }
        self.seen.clone_from(&self.synced);
    }
}

fn perform(bytes: &mut Vec<u8>, change: &Change) {
    match change {
        Change::SetLen(length) => bytes.resize(*length, 0),
        Change::Write(offset, data) => write(bytes, *offset, data),
    }
}

fn write(bytes: &mut Vec<u8>, offset: usize, data: &[u8]) {
    let end = offset + data.len();
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[offset..end].copy_from_slice(data);
}

/// Lets some of a write's sectors reach the disk.
fn tear(bytes: &mut Vec<u8>, change: &Change, random: &mut Random) {
    let Change::Write(offset, data) = change else {
        return;
    };
    for (index, sector) in data.chunks(SECTOR).enumerate() {
        if random.below(2) == 0 {
            write(bytes, offset + index * SECTOR, sector);
        }
    }
}

/// The operations that redb asks of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
    Sync,
}

/// An operation that will fail.
#[derive(Clone, Copy, Debug)]
pub struct Trap {
    /// `None` for any change.
    pub operation: Option<Operation>,
    /// How many such operations succeed before the one that fails.
    pub after: u64,
    pub kind: io::ErrorKind,
    /// Whether everything fails from then on until the disk is repaired.
    pub breaks: bool,
}

impl Trap {
    fn catches(&self, operation: Operation) -> bool {
        self.operation.map_or(operation != Operation::Read, |own| own == operation)
    }
}

#[derive(Debug, Default)]
struct Faults {
    trap: Option<Trap>,
    sprung: bool,
    broken: Option<io::ErrorKind>,
    free: Option<u64>,
    full: bool,
    /// Syncs wait as long as this is set.
    slow: bool,
    uncached: bool,
    segment_entries: Option<u64>,
}

#[derive(Clone, Debug, Default)]
pub struct SimulatedDisk {
    /// By the names of the files.
    media: Arc<Mutex<BTreeMap<String, Media>>>,
    faults: Arc<Mutex<Faults>>,
    quick: Arc<Condvar>,
}

impl SimulatedDisk {
    /// A disk with an empty ledger on it.
    pub fn formatted() -> Self {
        let disk = Self::default();
        let identity = FileIdentity { schema: schema::SCHEMA, epoch: 1 };
        let tables =
            [(File::Ledger, LEDGER_TABLES.as_slice()), (File::Bodies, BODIES_TABLES.as_slice())];
        for (file, tables) in tables {
            let database = disk.database(file).unwrap();
            tables::initialise(&database, tables, identity).unwrap();
        }
        disk
    }

    /// A store on this disk, whose account 1 has one key and a premium balance.
    pub fn store(&self, balance: u64) -> Store {
        let locked = LockedStore { place: LockedPlace::Folder(Arc::new(self.clone())) };
        let clock = Arc::new(TestClock::at(1));
        let store = locked.open(clock, Limits::default(), &OpenProgress::default()).unwrap();
        for command in opening(balance) {
            store.submit_blocking(command).unwrap();
        }
        store
    }

    /// Makes everything fail after `changes` more changes, as on a full or failing disk.
    pub fn fail_after(&self, changes: u64) {
        self.set(Trap {
            operation: None,
            after: changes,
            kind: io::ErrorKind::Other,
            breaks: true,
        });
    }

    pub fn set(&self, trap: Trap) {
        let mut faults = self.faults();
        faults.trap = Some(trap);
        faults.sprung = false;
    }

    /// Whether the planned failure has happened.
    pub fn has_failed(&self) -> bool {
        self.faults().sprung
    }

    pub fn mend(&self) {
        let mut faults = self.faults();
        faults.trap = None;
        faults.broken = None;
    }

    pub fn is_broken(&self) -> bool {
        self.faults().broken.is_some()
    }

    /// Lets databases opened from now on keep no page in memory, so that reads reach the disk.
    pub fn uncached(self) -> Self {
        self.faults().uncached = true;
        self
    }

    /// Lets ledgers opened from now on close parts of the journal that are this long.
    pub fn closing_parts_of(self, entries: u64) -> Self {
        self.faults().segment_entries = Some(entries);
        self
    }

    pub fn set_slow(&self, slow: bool) {
        self.faults().slow = slow;
        self.quick.notify_all();
    }

    /// Copies the files of a real folder.
    pub fn load(&self, dir: &Path) {
        for file in File::ALL {
            let bytes = std::fs::read(dir.join(file.name())).unwrap();
            let media = Media { synced: bytes.clone(), seen: bytes, unsynced: Vec::new() };
            self.media.lock().unwrap().insert(file.name().into(), media);
        }
    }

    pub fn lose_power(&self, random: &mut Random) {
        for media in self.media.lock().unwrap().values_mut() {
            media.lose_power(random);
        }
        self.mend();
    }

    pub fn set_free(&self, bytes: u64) {
        self.faults().free = Some(bytes);
    }

    /// A full disk takes no more changes and can still be read.
    pub fn set_full(&self, full: bool) {
        let mut faults = self.faults();
        faults.full = full;
        faults.free = full.then_some(0);
    }

    pub fn database(&self, file: File) -> StoreResult<Database> {
        self.database_named(file.name())
    }

    /// The names of closed parts of the journal.
    pub fn segments(&self) -> Vec<String> {
        let media = self.media.lock().unwrap();
        let names = media.keys().filter(|name| name.starts_with("journal-"));
        names.filter(|name| !name.contains(".new")).cloned().collect()
    }

    /// Takes a file away.
    pub fn remove(&self, name: &str) {
        self.media.lock().unwrap().remove(name).unwrap();
    }

    pub fn content(&self, name: &str) -> Vec<u8> {
        self.media.lock().unwrap()[name].seen.clone()
    }

    /// Changes the bytes of a file.
    pub fn spoil(&self, name: &str, spoil: impl FnOnce(&mut Vec<u8>)) {
        let mut media = self.media.lock().unwrap();
        let media = media.get_mut(name).unwrap();
        spoil(&mut media.seen);
        media.sync();
    }

    /// Changes rows of a closed file.
    pub fn change(&self, name: &str, change: impl FnOnce(&WriteTransaction) -> StateResult) {
        tables::write(&self.database_named(name).unwrap(), change).unwrap();
    }

    fn drive(&self, name: &str) -> Drive {
        Drive { disk: self.clone(), file: name.into() }
    }

    fn read_only(&self, name: &str) -> StoreResult<ReadOnlyDatabase> {
        if !self.media.lock().unwrap().contains_key(name) {
            return Err(StoreError::Unusable("is missing".into()));
        }
        let opened = Builder::new().open_read_only_with_backend(self.drive(name));
        opened.map_err(|error| StoreError::Unusable(error.to_string()))
    }

    fn database_named(&self, name: &str) -> StoreResult<Database> {
        self.database_with(name, true)
    }

    fn database_with(&self, name: &str, check_pages: bool) -> StoreResult<Database> {
        self.media.lock().unwrap().entry(name.into()).or_default();
        let drive = self.drive(name);
        let mut builder = Builder::new();
        builder.set_check_integrity_on_open(check_pages);
        if self.faults().uncached {
            builder.set_cache_size(0);
        }
        let opened = builder.create_with_backend(drive);
        opened.map_err(|error| StoreError::Unusable(error.to_string()))
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap()
    }
}

impl Disk for SimulatedDisk {
    fn open(&self, file: File, check_pages: bool) -> StoreResult<Database> {
        self.database_with(file.name(), check_pages)
    }

    fn create_segment(&self, name: &str) -> StoreResult<Database> {
        let unfinished = format!("{name}.new");
        self.media.lock().unwrap().remove(&unfinished);
        self.database_named(&unfinished)
    }

    fn open_unfinished_segment(&self, name: &str) -> StoreResult<ReadOnlyDatabase> {
        self.read_only(&format!("{name}.new"))
    }

    /// The new name is durable at once, and what was not synced may still be lost.
    fn finish_segment(&self, name: &str) -> StoreResult {
        self.drive(&format!("{name}.new"))
            .sync_data()
            .map_err(|error| StoreError::Unavailable(error.to_string()))?;
        let mut media = self.media.lock().unwrap();
        let whole = media.remove(&format!("{name}.new")).unwrap();
        media.insert(name.into(), whole);
        Ok(())
    }

    fn open_segment(&self, name: &str) -> StoreResult<ReadOnlyDatabase> {
        self.read_only(name)
    }

    fn segment_entries(&self) -> u64 {
        self.faults().segment_entries.unwrap_or(SEGMENT_ENTRIES)
    }

    fn free_bytes(&self) -> io::Result<u64> {
        Ok(self.faults().free.unwrap_or(u64::MAX))
    }
}

/// One file of the disk, as redb sees it.
#[derive(Debug)]
struct Drive {
    disk: SimulatedDisk,
    file: String,
}

impl Drive {
    fn perform<T>(
        &self,
        operation: Operation,
        then: impl FnOnce(&mut Media) -> T,
    ) -> io::Result<T> {
        let mut faults = self.disk.faults();
        while faults.slow && operation == Operation::Sync {
            faults = self.disk.quick.wait(faults).unwrap();
        }
        if let Some(trap) = faults.trap.as_mut().filter(|trap| trap.catches(operation)) {
            if trap.after > 0 {
                trap.after -= 1;
            } else {
                let Trap { kind, breaks, .. } = *trap;
                faults.trap = None;
                faults.sprung = true;
                faults.broken = breaks.then_some(kind);
                return Err(kind.into());
            }
        }
        if let Some(kind) = faults.broken.filter(|_| faults_reads(&faults, operation)) {
            return Err(kind.into());
        }
        if faults.full && operation != Operation::Read {
            return Err(io::ErrorKind::StorageFull.into());
        }
        drop(faults);
        let mut media = self.disk.media.lock().unwrap();
        Ok(then(media.get_mut(&self.file).unwrap()))
    }
}

/// A disk that cannot be written may still be read.
fn faults_reads(faults: &Faults, operation: Operation) -> bool {
    operation != Operation::Read || faults.broken != Some(io::ErrorKind::StorageFull)
}

impl StorageBackend for Drive {
    fn len(&self) -> io::Result<u64> {
        self.perform(Operation::Read, |media| media.seen.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.perform(Operation::Read, |media| {
            let from = offset as usize;
            let bytes = media.seen.get(from..from + out.len());
            bytes.map(|bytes| out.copy_from_slice(bytes))
        })?
        .ok_or(io::ErrorKind::UnexpectedEof.into())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.perform(Operation::Write, |media| media.change(Change::SetLen(len as usize)))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.perform(Operation::Sync, Media::sync)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.perform(Operation::Write, |media| {
            media.change(Change::Write(offset as usize, data.to_vec()));
        })
    }
}

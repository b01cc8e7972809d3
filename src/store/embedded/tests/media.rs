//! A simulated disk: writes that were not synced may be lost, torn or kept when the power goes, and
//! any operation can be made to fail. Everything is decided by a seed.

use super::super::disk::{Disk, File};
use super::super::rows::FileIdentity;
use super::super::tables::{BODIES_TABLES, LEDGER_TABLES};
use super::super::{EmbeddedBackend, files, schema};
use super::{TestClock, opening};
use crate::store::{AuditPolicy, Limits, Store, StoreError, StoreResult};
use redb::{Builder, Database, StorageBackend};
use std::collections::HashMap;
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
}

#[derive(Clone, Debug, Default)]
pub struct SimulatedDisk {
    media: Arc<Mutex<HashMap<File, Media>>>,
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
            files::initialise(&database, tables, identity).unwrap();
        }
        disk
    }

    /// A store on this disk, whose account 1 has one key and a premium balance.
    pub fn store(&self, balance: u64) -> Store {
        let backend = Arc::new(EmbeddedBackend::open_on(Box::new(self.clone())).unwrap());
        let clock = Arc::new(TestClock::at(1));
        let store = Store::start(
            &backend,
            clock,
            Limits::default(),
            AuditPolicy::Always,
            &Default::default(),
        )
        .unwrap();
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

    pub fn set_slow(&self, slow: bool) {
        self.faults().slow = slow;
        self.quick.notify_all();
    }

    /// Copies the files of a real folder.
    pub fn load(&self, dir: &Path) {
        for file in File::ALL {
            let bytes = std::fs::read(dir.join(file.name())).unwrap();
            let media = Media { synced: bytes.clone(), seen: bytes, unsynced: Vec::new() };
            self.media.lock().unwrap().insert(file, media);
        }
    }

    pub fn lose_power(&self, random: &mut Random) {
        let mut media = self.media.lock().unwrap();
        for file in File::ALL {
            media.get_mut(&file).unwrap().lose_power(random);
        }
        drop(media);
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
        self.media.lock().unwrap().entry(file).or_default();
        let drive = Drive { disk: self.clone(), file };
        let mut builder = Builder::new();
        builder.set_check_integrity_on_open(true);
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
    fn open(&self, file: File) -> StoreResult<Database> {
        self.database(file)
    }

    fn free_bytes(&self) -> io::Result<u64> {
        Ok(self.faults().free.unwrap_or(u64::MAX))
    }
}

/// One file of the disk, as redb sees it.
#[derive(Debug)]
struct Drive {
    disk: SimulatedDisk,
    file: File,
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

//! A simulated disk: writes that were not synced may be lost, torn or kept when the power goes, and any operation can
//! be made to fail. Everything is decided by a seed.

use super::super::disk::{Disk, File};
use super::super::files;
use super::super::rows::Identity;
use super::super::tables::{BODIES_TABLES, LEDGER_TABLES};
use super::super::{Result, StoreError};
use redb::{Builder, Database, StorageBackend};
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

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

/// One file: what is safe, and what was changed since.
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

    /// Every change since the last sync is kept, lost, or kept in part, whatever came after it.
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

/// Some of a write's sectors reach the disk.
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

#[derive(Debug, Default)]
struct Faults {
    /// Changes until one fails; all fail from then on until mended.
    changes_left: Option<u64>,
    broken: bool,
    free: Option<u64>,
    full: bool,
}

#[derive(Clone, Debug, Default)]
pub struct SimulatedDisk {
    media: Arc<Mutex<HashMap<File, Media>>>,
    faults: Arc<Mutex<Faults>>,
}

impl SimulatedDisk {
    /// A disk with an empty ledger on it.
    pub fn formatted() -> Self {
        let disk = Self::default();
        let identity = Identity { schema: files::SCHEMA, epoch: 1 };
        let tables = [(File::Ledger, LEDGER_TABLES.as_slice()), (File::Bodies, BODIES_TABLES.as_slice())];
        for (file, tables) in tables {
            let database = disk.database(file).unwrap();
            files::initialise(&database, tables, identity).unwrap();
        }
        disk
    }

    /// After `changes` more changes everything fails, as on a full or dying disk.
    pub fn fail_after(&self, changes: u64) {
        self.faults().changes_left = Some(changes);
    }

    pub fn mend(&self) {
        let mut faults = self.faults();
        faults.changes_left = None;
        faults.broken = false;
    }

    pub fn is_broken(&self) -> bool {
        self.faults().broken
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

    fn database(&self, file: File) -> Result<Database> {
        self.media.lock().unwrap().entry(file).or_default();
        let drive = Drive { disk: self.clone(), file };
        let mut builder = Builder::new();
        builder.set_check_integrity_on_open(true);
        let opened = builder.create_with_backend(drive);
        opened.map_err(|error| StoreError::Unusable(error.to_string()))
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap()
    }
}

impl Disk for SimulatedDisk {
    fn open(&self, file: File) -> Result<Database> {
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
    fn with<T>(&self, then: impl FnOnce(&mut Media) -> T) -> io::Result<T> {
        if self.disk.is_broken() {
            return Err(io::Error::other("broken"));
        }
        let mut media = self.disk.media.lock().unwrap();
        Ok(then(media.get_mut(&self.file).unwrap()))
    }

    fn change(&self, then: impl FnOnce(&mut Media)) -> io::Result<()> {
        let mut faults = self.disk.faults();
        match &mut faults.changes_left {
            Some(0) => faults.broken = true,
            Some(left) => *left -= 1,
            None => {}
        }
        if faults.full {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        drop(faults);
        self.with(then)
    }
}

impl StorageBackend for Drive {
    fn len(&self) -> io::Result<u64> {
        self.with(|media| media.seen.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.with(|media| {
            let from = offset as usize;
            let bytes = media.seen.get(from..from + out.len());
            bytes.map(|bytes| out.copy_from_slice(bytes))
        })?
        .ok_or(io::ErrorKind::UnexpectedEof.into())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(|media| media.change(Change::SetLen(len as usize)))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.change(Media::sync)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(|media| media.change(Change::Write(offset as usize, data.to_vec())))
    }
}

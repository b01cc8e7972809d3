//! A folder for measurements: its syncs are counted and timed, and may take as long as those of a
//! slower disk.

#![expect(clippy::disallowed_methods, reason = "it measures how long fsync takes")]

use super::disk::{self, Disk, File, LockedFolder};
use crate::StoreResult;
use redb::backends::FileBackend;
use redb::{Database, ReadOnlyDatabase, StorageBackend};
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Counts the syncs of a ledger's files and the time spent in them.
#[derive(Debug, Default)]
pub struct SyncMeter {
    at_least: Duration,
    count: AtomicU64,
    nanos: AtomicU64,
}

impl SyncMeter {
    /// No sync returns earlier than after `at_least`.
    pub fn new(at_least: Duration) -> Arc<Self> {
        Arc::new(Self { at_least, ..Self::default() })
    }

    /// Syncs so far, and the time spent in them.
    pub fn total(&self) -> (u64, Duration) {
        let nanos = self.nanos.load(Ordering::Relaxed);
        (self.count.load(Ordering::Relaxed), Duration::from_nanos(nanos))
    }

    fn measure(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let began = Instant::now();
        let done = sync();
        thread::sleep(self.at_least.saturating_sub(began.elapsed()));
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
        done
    }
}

pub(super) struct MeteredFolder {
    pub folder: LockedFolder,
    pub meter: Arc<SyncMeter>,
}

impl Disk for MeteredFolder {
    fn open(&self, file: File, check_pages: bool) -> StoreResult<Database> {
        let path = self.folder.path(file);
        let refuse = |why: &dyn std::fmt::Display| disk::unusable(&path, "cannot be opened", why);
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|error| refuse(&error))?;
        let file = FileBackend::new(opened).map_err(|error| refuse(&error))?;
        let metered = MeteredFile { file, meter: Arc::clone(&self.meter) };
        let builder = disk::builder(check_pages, self.folder.cache_bytes());
        builder.create_with_backend(metered).map_err(|error| refuse(&error))
    }

    fn create_segment(&self, name: &str) -> StoreResult<Database> {
        self.folder.create_segment(name)
    }

    fn open_unfinished_segment(&self, name: &str) -> StoreResult<ReadOnlyDatabase> {
        self.folder.open_unfinished_segment(name)
    }

    fn finish_segment(&self, name: &str) -> StoreResult {
        self.folder.finish_segment(name)
    }

    fn open_segment(&self, name: &str) -> StoreResult<ReadOnlyDatabase> {
        self.folder.open_segment(name)
    }

    fn folder(&self) -> Option<&Path> {
        self.folder.folder()
    }

    fn free_bytes(&self) -> io::Result<u64> {
        self.folder.free_bytes()
    }
}

#[derive(Debug)]
struct MeteredFile {
    file: FileBackend,
    meter: Arc<SyncMeter>,
}

impl StorageBackend for MeteredFile {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.meter.measure(|| self.file.sync_data())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write(offset, data)
    }
}

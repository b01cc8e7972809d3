//! The names and places of the two databases. Only this file knows them, and what a file must look
//! like to be opened.

use super::rows::FileIdentity;
use super::schema;
use crate::settings::LedgerSettings;
use crate::{StoreError, StoreResult};
use cresset_base::{FileLock, durable_file, failpoint};
use parking_lot::Mutex;
use redb::{Builder, Database, DatabaseError, ReadOnlyDatabase};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};

/// Memory that a file may use for its pages, bytes, where it is written or checked as a whole, such
/// as a backup.
const WHOLE_CACHE_BYTES: usize = 128 << 20;
/// The same for an open segment. Its inner pages fit.
const SEGMENT_CACHE_BYTES: usize = 2 << 20;
/// Entries of one segment. A segment of this many takes 66 MB on the disk.
pub(super) const SEGMENT_ENTRIES: u64 = 262_144;
/// Bytes read at once where a file is read from front to back.
const READ_BYTES: usize = 1 << 20;
/// The first bytes of every redb file.
const MAGIC: [u8; 9] = *b"redb\x1a\x0a\xa9\x0d\x0a";
const LOCK: &str = "lock";
/// The files hold answers and names, and whoever can open the lock can hold it.
pub(super) const OWNER_ONLY: u32 = 0o600;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum File {
    /// Money, credentials and requests. It is kept small, so that its commits are cheap.
    Ledger,
    /// Stored answers and tombstones.
    Bodies,
}

impl File {
    pub(super) const ALL: [Self; 2] = [Self::Ledger, Self::Bodies];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ledger => "ledger.redb",
            Self::Bodies => "bodies.redb",
        }
    }

    /// The file's name until it is complete.
    pub(super) fn unfinished(self) -> String {
        unfinished(self.name())
    }
}

/// The name of a file until it is complete.
fn unfinished(name: &str) -> String {
    format!("{name}.new")
}

/// Storage that databases can be opened on; tests supply one that fails on purpose.
pub(crate) trait Disk: Send + Sync + 'static {
    /// Opens an existing database, with `check_pages` after checking every page of it. Never
    /// creates one.
    fn open(&self, file: File, check_pages: bool) -> StoreResult<Database>;
    /// Makes the file of a closed part of the journal, in place of one that was left unfinished. It
    /// has no name yet.
    fn create_segment(&self, name: &str) -> StoreResult<Database>;
    /// Opens one that has no name yet for reading.
    fn open_unfinished_segment(&self, name: &str) -> StoreResult<ReadOnlyDatabase>;
    /// Gives a whole one its name, durably.
    fn finish_segment(&self, name: &str) -> StoreResult;
    /// Opens one for reading.
    fn open_segment(&self, name: &str) -> StoreResult<ReadOnlyDatabase>;
    /// Entries of one closed part of the journal.
    fn segment_entries(&self) -> u64 {
        failpoint!("store::segment_entries", |entries: Option<String>| {
            entries.and_then(|entries| entries.parse().ok()).expect("invariant: a number is given")
        });
        SEGMENT_ENTRIES
    }
    fn free_bytes(&self) -> io::Result<u64>;
    /// Where the files are, if they are on this machine's disks.
    fn folder(&self) -> Option<&Path> {
        None
    }
    /// Sizes of the files, by what they hold.
    fn file_bytes(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::new()
    }
    /// Whether the files are still found under their names.
    fn is_in_place(&self) -> bool {
        true
    }
}

/// Device and inode: which file of the machine a name stands for.
type FileNumber = (u64, u64);

fn number(found: &fs::Metadata) -> FileNumber {
    (found.dev(), found.ino())
}

fn number_at(path: &Path) -> Option<FileNumber> {
    fs::metadata(path).ok().map(|found| number(&found))
}

/// A locked folder of the file system.
pub(super) struct LockedFolder {
    dir: PathBuf,
    pub(super) settings: LedgerSettings,
    /// The lock is held until this is dropped with the last handle of the store.
    lock: FileLock,
    /// The databases as they were when they were opened, to notice that one was replaced.
    opened: Mutex<HashMap<File, FileNumber>>,
}

impl LockedFolder {
    /// Locks the folder for this process; `InUse` when another process has it.
    pub(super) fn lock(dir: &Path) -> StoreResult<Self> {
        let (lock, settings) = (lock_file(dir)?, LedgerSettings::default());
        Ok(Self { dir: dir.to_owned(), settings, lock, opened: Mutex::default() })
    }

    /// Memory that each of the two databases may use for its pages, bytes. What is not there is
    /// nearly always in the page cache of the kernel.
    pub(super) fn cache_bytes(&self) -> usize {
        (self.settings.cache_mib as usize) << 20
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn path(&self, file: File) -> PathBuf {
        self.dir.join(file.name())
    }

    pub(super) fn unfinished(&self, file: File) -> PathBuf {
        self.dir.join(file.unfinished())
    }

    /// Gives a completed file its name, durably.
    pub(super) fn finish(&self, file: File) -> StoreResult {
        rename(&self.unfinished(file), &self.path(file))
    }
}

/// Locks a folder for this process until the lock is dropped; `InUse` when another process has it.
pub(crate) fn lock_file(dir: &Path) -> StoreResult<FileLock> {
    let opened = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(OWNER_ONLY)
        .open(dir.join(LOCK));
    let file = opened.map_err(|error| unusable(dir, UNLOCKED, &error))?;
    FileLock::take(file).map_err(|error| match error {
        TryLockError::WouldBlock => {
            StoreError::InUse(format!("{} is in use by another process", dir.display()))
        }
        TryLockError::Error(error) => unusable(dir, UNLOCKED, &error),
    })
}

impl Disk for LockedFolder {
    fn open(&self, file: File, check_pages: bool) -> StoreResult<Database> {
        let path = self.path(file);
        check_schema(&path, file, schema::SCHEMA)?;
        let database = open_with(&path, check_pages, self.cache_bytes())?;
        if let Some(number) = number_at(&path) {
            self.opened.lock().insert(file, number);
        }
        Ok(database)
    }

    fn create_segment(&self, name: &str) -> StoreResult<Database> {
        let path = self.dir.join(unfinished(name));
        remove_leftover(&path)?;
        create(&path)
    }

    fn open_unfinished_segment(&self, name: &str) -> StoreResult<ReadOnlyDatabase> {
        open_to_read(&self.dir.join(unfinished(name)))
    }

    fn finish_segment(&self, name: &str) -> StoreResult {
        let from = self.dir.join(unfinished(name));
        let synced = fs::File::open(&from).and_then(|file| file.sync_all());
        synced.map_err(|error| unusable(&from, UNWRITTEN, &error))?;
        rename(&from, &self.dir.join(name))
    }

    fn open_segment(&self, name: &str) -> StoreResult<ReadOnlyDatabase> {
        open_to_read(&self.dir.join(name))
    }

    fn is_in_place(&self) -> bool {
        let lock = self.lock.file().metadata().ok().map(|found| number(&found));
        number_at(&self.dir.join(LOCK)) == lock
            && self.opened.lock().iter().all(|(&file, &at)| number_at(&self.path(file)) == Some(at))
    }

    fn file_bytes(&self) -> BTreeMap<&'static str, u64> {
        let mut sizes = BTreeMap::from([("ledger", 0), ("answers", 0), ("journal", 0)]);
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let (name, bytes) =
                (entry.file_name(), entry.metadata().map_or(0, |found| found.len()));
            let kind = match name.to_str() {
                Some(name) if name == File::Ledger.name() => "ledger",
                Some(name) if name == File::Bodies.name() => "answers",
                Some(name) if name.starts_with("journal-") => "journal",
                _ => continue,
            };
            *sizes.entry(kind).or_default() += bytes;
        }
        sizes
    }

    fn folder(&self) -> Option<&Path> {
        Some(&self.dir)
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let space = rustix::fs::statvfs(&self.dir)?;
        Ok(space.f_bavail.saturating_mul(space.f_frsize))
    }
}

/// Creates or empties a file that only its owner may read.
pub(super) fn create_private(path: &Path) -> io::Result<fs::File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(OWNER_ONLY).open(path)
}

/// Creates a database in a file that must not exist yet.
pub(super) fn create(path: &Path) -> StoreResult<Database> {
    let fresh = OpenOptions::new().write(true).create_new(true).mode(OWNER_ONLY).open(path);
    fresh.map_err(|error| unusable(path, UNWRITTEN, &error))?;
    let created = builder(true, WHOLE_CACHE_BYTES).create(path);
    created.map_err(|error| unusable(path, UNWRITTEN, &error))
}

/// Opens a database file after checking every page of it.
pub(super) fn open_existing(path: &Path) -> StoreResult<Database> {
    open_with(path, true, WHOLE_CACHE_BYTES)
}

fn open_with(path: &Path, check_pages: bool, cache_bytes: usize) -> StoreResult<Database> {
    check_kind(path)?;
    if check_pages {
        read_in_order(path)?;
    }
    // The database panics on some damaged files. No part of it outlives the unwinding.
    let open = || builder(check_pages, cache_bytes).open(path);
    match panic::catch_unwind(AssertUnwindSafe(open)) {
        Ok(Ok(database)) => Ok(database),
        Ok(Err(DatabaseError::DatabaseAlreadyOpen)) => Err(StoreError::Unusable(format!(
            "{} is open in another process: stop that one",
            path.display()
        ))),
        Ok(Err(error)) => Err(unusable(path, DAMAGED, &error)),
        Err(_) => Err(unusable(path, DAMAGED, &CONTRADICTION)),
    }
}

/// Brings a file into the page cache. The check of its pages follows the tree, so without this it
/// would read a cold disk in small pieces from all over the file.
fn read_in_order(path: &Path) -> StoreResult {
    let read = fs::File::open(path).and_then(|file| {
        io::copy(&mut io::BufReader::with_capacity(READ_BYTES, file), &mut io::sink())
    });
    read.map(drop).map_err(|error| unusable(path, UNREAD, &error))
}

/// Opens a file that nothing writes to.
fn open_to_read(path: &Path) -> StoreResult<ReadOnlyDatabase> {
    let mut builder = Builder::new();
    builder.set_cache_size(SEGMENT_CACHE_BYTES);
    let refuse = |why: &dyn std::fmt::Display| {
        StoreError::Unusable(format!(
            "cannot be read in {}: {why}; put the file back as it was, or restore a backup",
            path.parent().unwrap_or(path).display()
        ))
    };
    match panic::catch_unwind(AssertUnwindSafe(|| builder.open_read_only(path))) {
        Ok(opened) => opened.map_err(|error| refuse(&error)),
        Err(_) => Err(refuse(&CONTRADICTION)),
    }
}

/// Removes a file that an interrupted run left unfinished.
pub(super) fn remove_leftover(path: &Path) -> StoreResult {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(unusable(path, "cannot be removed; remove it by hand, then do it again", &error))
        }
        _ => Ok(()),
    }
}

/// Refuses a file of a schema above `known`, or of an older format, before anything is written to
/// it. All other faults are found when it is opened.
pub(super) fn check_schema(path: &Path, file: File, known: u32) -> StoreResult {
    let read = || -> Option<FileIdentity> {
        let database = Builder::new().open_read_only(path).ok()?;
        schema::identity(&database, file.name()).ok()
    };
    match panic::catch_unwind(read) {
        Ok(Some(found)) => schema::check(found.schema, known, file.name()),
        _ => Ok(()),
    }
}

const UNLOCKED: &str = "cannot be locked; it must be a folder that this user may write to";
pub(super) const UNWRITTEN: &str =
    "cannot be created; give it another place, free space there, or change who may write there";
const UNREAD: &str = "cannot be read; it must be a file that this user may read and write";
const DAMAGED: &str = "is damaged or cannot be read; keep a copy of it and restore a backup";

/// What is told of a file on which the database panics.
pub(super) const CONTRADICTION: &str = "its pages contradict each other";

pub(super) fn builder(check_pages: bool, cache_bytes: usize) -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(cache_bytes).set_check_integrity_on_open(check_pages);
    builder
}

/// Refuses a file that is no database before redb may touch it.
fn check_kind(path: &Path) -> StoreResult {
    let mut head = Vec::new();
    let read = fs::File::open(path).and_then(|file| {
        let head_bytes = MAGIC.len() as u64;
        file.take(head_bytes).read_to_end(&mut head)
    });
    let shown = path.display();
    match read {
        Ok(_) if head == MAGIC => Ok(()),
        Ok(0) => Err(StoreError::Unusable(format!(
            "{shown} is empty: a ledger was lost here; restore a backup, or, to begin anew, remove both files and run `cresset init`"
        ))),
        Ok(_) => Err(StoreError::Unusable(format!(
            "{shown} is no ledger file: check the configured folder"
        ))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(StoreError::Unusable(format!(
                "there is no {shown}: create a ledger with `cresset init`, or restore a backup"
            )))
        }
        Err(error) => Err(unusable(path, UNREAD, &error)),
    }
}

/// Renames and makes the new name durable.
pub(super) fn rename(from: &Path, to: &Path) -> StoreResult {
    failpoint!("store::rename");
    fs::rename(from, to).and_then(|()| durable_file::sync_name(to)).map_err(|error| {
        unusable(
            to,
            "cannot be put in place; free space or change who may write there, then do it again",
            &error,
        )
    })
}

pub(super) fn unusable(path: &Path, what: &str, why: &dyn std::fmt::Display) -> StoreError {
    StoreError::Unusable(format!("{} {what}: {why}", path.display()))
}

//! Tables and keys of the two files, and transactions over them. Keys are big-endian bytes, so
//! their order is the order of what they name.

use super::rows::FileIdentity;
use crate::codec::{self, StoredField};
pub(super) use crate::rows::{crash_key, entry_key, grant_key, request_key, request_prefix};
use cresset_base::UnixMillis;
use cresset_ledger::{StateError, StateResult};
use redb::{Database, ReadTransaction, ReadableTable, Table, TableDefinition, WriteTransaction};
use std::ops::Bound;

pub(super) type Definition = TableDefinition<'static, &'static [u8], &'static [u8]>;
pub(super) type Writable<'t> = Table<'t, &'static [u8], &'static [u8]>;
pub(super) type ReadOnly = redb::ReadOnlyTable<&'static [u8], &'static [u8]>;

/// In both files: `format`; in the ledger also `tenure` (the clean marker), `progress`, `sealed`,
/// `set_back`, `misses_uses` and `unchecked`.
pub(super) const META: Definition = TableDefinition::new("meta");
pub(super) const FORMAT: &[u8] = b"format";
/// What files have in place of `format` that were written before schemas began at 1.
pub(super) const OLDER_FORMAT: &[u8] = b"identity";
pub(super) const CLEAN_MARKER: &[u8] = b"tenure";
pub(super) const PROGRESS: &[u8] = b"progress";
/// What audits found sound.
pub(super) const SEALED: &[u8] = b"sealed";
/// Sequences of the entries after which an operator set the time back.
pub(super) const SET_BACK: &[u8] = b"set_back";
/// There where a build before schema 2 set the time back, and so forgot uses of periods.
pub(super) const MISSES_USES: &[u8] = b"misses_uses";
/// The boot that used the files after a stop that was not orderly without a check of every page.
pub(super) const UNCHECKED: &[u8] = b"unchecked";

// Tables of ledger.redb: money, and requests that are live or recent.
pub(super) const ACCOUNTS: Definition = TableDefinition::new("accounts");
pub(super) const BALANCES: Definition = TableDefinition::new("balances");
pub(super) const APPLICATIONS: Definition = TableDefinition::new("applications");
pub(super) const CREDENTIALS: Definition = TableDefinition::new("credentials");
/// Digest of a secret → credential id.
pub(super) const DIGESTS: Definition = TableDefinition::new("digests");
/// Account and reference → what was granted or debited.
pub(super) const GRANTS: Definition = TableDefinition::new("grants");
pub(super) const REQUESTS: Definition = TableDefinition::new("requests");
/// The times at which requests ended, each with its request key, for the move into the archive.
pub(super) const ENDED: Definition = TableDefinition::new("ended");
pub(super) const RESERVATIONS: Definition = TableDefinition::new("reservations");
/// Account and fingerprint → crashes the input was running in.
pub(super) const CRASHES: Definition = TableDefinition::new("crashes");
/// The journal, by sequence.
pub(super) const ENTRIES: Definition = TableDefinition::new("entries");
/// Account and sequence.
pub(super) const ENTRIES_BY_ACCOUNT: Definition = TableDefinition::new("entries_by_account");

/// First sequence of a closed part of the journal → its last sequence and hash.
pub(super) const SEGMENTS: Definition = TableDefinition::new("segments");

pub(super) const LEDGER_TABLES: [Definition; 14] = [
    META,
    ACCOUNTS,
    BALANCES,
    APPLICATIONS,
    CREDENTIALS,
    DIGESTS,
    GRANTS,
    REQUESTS,
    ENDED,
    RESERVATIONS,
    CRASHES,
    ENTRIES,
    ENTRIES_BY_ACCOUNT,
    SEGMENTS,
];

// Tables of bodies.redb: stored answers and archived requests.
pub(super) const BODIES: Definition = TableDefinition::new("bodies");
/// Expiry and key of a body.
pub(super) const BODIES_DUE: Definition = TableDefinition::new("bodies_due");
/// Account → bytes of the rows of its bodies.
pub(super) const ANSWER_BYTES: Definition = TableDefinition::new("answer_bytes");
/// Requests past retention: still known, never run again.
pub(super) const ARCHIVE: Definition = TableDefinition::new("archive");
/// Time an archived request ended, and its key.
pub(super) const ARCHIVE_DUE: Definition = TableDefinition::new("archive_due");

pub(super) const BODIES_TABLES: [Definition; 6] =
    [META, BODIES, BODIES_DUE, ANSWER_BYTES, ARCHIVE, ARCHIVE_DUE];

/// In backups alone: the name of a file of the node → its content.
pub(super) const NODE_FILES: Definition = TableDefinition::new("node_files");

/// Creates the tables that are missing.
pub(super) fn create(txn: &WriteTransaction, tables: &[Definition]) -> StateResult {
    for table in tables {
        txn.open_table(*table).or_fault()?;
    }
    Ok(())
}

/// The key of an index by time: `at`, then the key of the row that is due.
pub(super) fn due_key(at: UnixMillis, key: &[u8]) -> Vec<u8> {
    [&at.0.to_be_bytes(), key].concat()
}

/// The key of the row that is due, out of a key made by `due_key`.
pub(super) fn due_subject(key: &[u8]) -> &[u8] {
    key.get(8..).unwrap_or_default()
}

pub(super) fn get<T: StoredField>(
    table: &impl ReadableTable<&'static [u8], &'static [u8]>,
    key: &[u8],
) -> StateResult<Option<T>> {
    let stored = table.get(key).or_fault()?;
    stored.map(|stored| codec::decode(key, stored.value())).transpose()
}

pub(super) fn put(table: &mut Writable<'_>, key: &[u8], row: &impl StoredField) -> StateResult {
    table.insert(key, codec::encode(key, row).as_slice()).or_fault()?;
    Ok(())
}

/// Every row in key order, as (key, row). A damaged row is an `Err` item of its own.
pub(super) fn rows<T: StoredField>(
    table: &impl ReadableTable<&'static [u8], &'static [u8]>,
) -> StateResult<impl Iterator<Item = StateResult<(Vec<u8>, T)>>> {
    Ok(table.iter().or_fault()?.map(|pair| {
        let (key, stored) = pair.or_fault()?;
        let row = codec::decode(key.value(), stored.value())?;
        Ok((key.value().to_vec(), row))
    }))
}

/// The rows of a range of keys, as (key, row). A damaged row is an `Err` item of its own; after a
/// failure of the database there are no further items.
pub(super) fn range<T: StoredField>(
    table: &ReadOnly,
    keys: (Bound<&[u8]>, Bound<&[u8]>),
) -> StateResult<impl Iterator<Item = StateResult<(Vec<u8>, T)>> + use<T>> {
    range_with(table, keys, |key, stored| Ok((key.to_vec(), codec::decode(key, stored)?)))
}

/// What `read` makes of each key and the stored form of its row, as `range` returns it.
pub(super) fn range_with<T, R: FnMut(&[u8], &[u8]) -> StateResult<T>>(
    table: &ReadOnly,
    keys: (Bound<&[u8]>, Bound<&[u8]>),
    mut read: R,
) -> StateResult<impl Iterator<Item = StateResult<T>> + use<T, R>> {
    let pairs = table.range::<&[u8]>(keys).or_fault()?;
    let failed = |pair: &Result<_, _>| pair.is_err();
    Ok(until_after(pairs, failed).map(move |pair| {
        let (key, stored) = pair.or_fault()?;
        read(key.value(), stored.value())
    }))
}

/// The rows whose keys begin with `prefix`, as `range` returns them.
pub(super) fn under<T: StoredField>(
    table: &ReadOnly,
    prefix: &[u8],
) -> StateResult<impl Iterator<Item = StateResult<(Vec<u8>, T)>> + use<T>> {
    let behind = successor(prefix);
    let end = behind.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
    range(table, (Bound::Included(prefix), end))
}

/// The first key after all that begin with `prefix`; `None` when there is none.
fn successor(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|byte| *byte < u8::MAX)?;
    let mut behind = prefix[..=last].to_vec();
    behind[last] += 1;
    Some(behind)
}

/// Ends after the first item that `is_last`.
fn until_after<T>(
    items: impl Iterator<Item = T>,
    is_last: impl Fn(&T) -> bool,
) -> impl Iterator<Item = T> {
    items.scan(false, move |ended, item| {
        if *ended {
            return None;
        }
        *ended = is_last(&item);
        Some(item)
    })
}

pub(super) fn open(txn: &ReadTransaction, table: Definition) -> StateResult<ReadOnly> {
    txn.open_table(table).or_fault()
}

/// Turns the database's errors into the ledger's. A conversion for `?` would belong to the ledger,
/// which knows no database.
pub(super) trait OrFault<T> {
    fn or_fault(self) -> StateResult<T>;
}

impl<T, E: Into<redb::Error>> OrFault<T> for Result<T, E> {
    fn or_fault(self) -> StateResult<T> {
        self.map_err(|error| fault(error.into()))
    }
}

pub(super) fn fault(error: redb::Error) -> StateError {
    match error {
        redb::Error::Corrupted(what) => StateError::Corrupt(what),
        redb::Error::TableTypeMismatch { .. } | redb::Error::TableDoesNotExist(_) => {
            StateError::Corrupt(error.to_string())
        }
        other => StateError::Io(other.to_string()),
    }
}

/// Gives an empty database its tables and identity.
pub(super) fn initialise(
    database: &Database,
    tables: &[Definition],
    identity: FileIdentity,
) -> StateResult {
    write(database, |txn| {
        create(txn, tables)?;
        set_identity(txn, identity)
    })
}

pub(super) fn set_identity(txn: &WriteTransaction, identity: FileIdentity) -> StateResult {
    let mut meta = txn.open_table(META).or_fault()?;
    put(&mut meta, FORMAT, &identity)
}

/// One durable transaction, abandoned when `change` fails.
pub(super) fn write(
    database: &Database,
    change: impl FnOnce(&WriteTransaction) -> StateResult,
) -> StateResult {
    let txn = database.begin_write().or_fault()?;
    change(&txn)?;
    txn.commit().or_fault()
}

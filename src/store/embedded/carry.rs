//! What a restore takes over from the ledger that it replaces: who was locked out there since the
//! backup was made stays locked out. It also finds what the backup does not know.

use super::disk::{self, File, LockedFolder};
use super::schema;
use super::tables::{self, Definition, OrFault, ReadOnly};
use crate::StoreResult;
use crate::codec::StoredField;
use crate::restore::{LostRows, ReplacedState, RestoreReport};
use cresset_ledger::{Account, AccountStatus, Credential, StateResult};
use redb::{Database, ReadTransaction, ReadableDatabase, ReadableTable};

/// The ledger that a restore is about to replace, as far as it can be read.
pub(super) struct ReplacedLedger {
    ledger: Option<Database>,
    bodies: Option<Database>,
    state: ReplacedState,
}

impl ReplacedLedger {
    pub(super) fn open(folder: &LockedFolder) -> Self {
        if !folder.path(File::Ledger).exists() {
            return Self { ledger: None, bodies: None, state: ReplacedState::Absent };
        }
        // Answers alone decide nothing here, so damaged ones only leave requests uncounted.
        let bodies = disk::open_existing(&folder.path(File::Bodies)).ok();
        match disk::open_existing(&folder.path(File::Ledger)) {
            Ok(ledger) => Self { ledger: Some(ledger), bodies, state: ReplacedState::Read },
            Err(error) => {
                let state = ReplacedState::Unreadable(error.to_string());
                Self { ledger: None, bodies, state }
            }
        }
    }

    /// The epoch of the ledger; 0 when there is none that can be read.
    pub(super) fn epoch(&self) -> u64 {
        epoch_of(self.ledger.as_ref(), File::Ledger).unwrap_or(0)
    }

    /// Whether a restore was interrupted between its renames, so that the bodies are its own.
    pub(super) fn is_halfway(&self) -> bool {
        let ledger = epoch_of(self.ledger.as_ref(), File::Ledger);
        let bodies = epoch_of(self.bodies.as_ref(), File::Bodies);
        ledger.zip(bodies).is_some_and(|(ledger, bodies)| ledger != bodies)
    }
}

fn epoch_of(database: Option<&Database>, file: File) -> Option<u64> {
    schema::identity(database?, file.name()).ok().map(|identity| identity.epoch)
}

/// Revokes and suspends in `restored`, which holds the tables of both files, what is revoked and
/// suspended in the replaced ledger.
pub(super) fn over(replaced: &ReplacedLedger, restored: &Database) -> StoreResult<RestoreReport> {
    let mut report = RestoreReport { replaced: replaced.state.clone(), ..RestoreReport::default() };
    let txn = replaced.ledger.as_ref().map(Database::begin_read).transpose();
    let old = txn.or_fault()?;
    let copy = restored.begin_read().or_fault()?;
    credentials(&copy, old.as_ref(), &mut report)?;
    accounts(&copy, old.as_ref(), &mut report)?;
    if let Some(old) = &old {
        let bodies = replaced.bodies.as_ref().map(Database::begin_read).transpose();
        let bodies = bodies.or_fault()?;
        match lost(&copy, old, bodies.as_ref()) {
            Ok(lost) => report.lost = Some(lost),
            Err(error) => report.doubt(&error),
        }
    }
    drop(copy);
    tables::write(restored, |txn| {
        let mut table = txn.open_table(tables::CREDENTIALS).or_fault()?;
        for row in &report.kept_revoked {
            tables::put(&mut table, row.id.0.as_bytes(), row)?;
        }
        let mut table = txn.open_table(tables::ACCOUNTS).or_fault()?;
        for row in &report.kept_suspended {
            tables::put(&mut table, row.id.0.as_bytes(), row)?;
        }
        Ok(())
    })?;
    Ok(report)
}

/// Sorts the credentials that the backup holds as valid: those that were revoked since, and those
/// of which the replaced ledger says nothing.
fn credentials(
    copy: &ReadTransaction,
    old: Option<&ReadTransaction>,
    report: &mut RestoreReport,
) -> StateResult {
    for row in tables::under::<Credential>(&tables::open(copy, tables::CREDENTIALS)?, b"")? {
        let (key, credential) = row?;
        if credential.revoked_at.is_some() {
            continue;
        }
        match recall::<Credential>(old, tables::CREDENTIALS, &key, report) {
            Some(Credential { revoked_at: None, .. }) => {}
            Some(Credential { revoked_at, .. }) => {
                report.kept_revoked.push(Credential { revoked_at, ..credential });
            }
            None => report.valid_again.push(credential),
        }
    }
    Ok(())
}

fn accounts(
    copy: &ReadTransaction,
    old: Option<&ReadTransaction>,
    report: &mut RestoreReport,
) -> StateResult {
    for row in tables::under::<Account>(&tables::open(copy, tables::ACCOUNTS)?, b"")? {
        let (key, account) = row?;
        let before = recall::<Account>(old, tables::ACCOUNTS, &key, report);
        let suspended = before.is_some_and(|before| before.status == AccountStatus::Suspended);
        if suspended && account.status == AccountStatus::Active {
            let status = AccountStatus::Suspended;
            report.kept_suspended.push(Account { status, ..account });
        }
    }
    Ok(())
}

/// A row of the replaced ledger; `None` where it has none or a damaged one.
fn recall<T: StoredField>(
    old: Option<&ReadTransaction>,
    table: Definition,
    key: &[u8],
    report: &mut RestoreReport,
) -> Option<T> {
    let found = tables::open(old?, table).and_then(|table| tables::get(&table, key));
    found.map_err(|error| report.doubt(&error)).ok().flatten()
}

/// Counts the rows of the replaced ledger that the backup does not know.
fn lost(
    copy: &ReadTransaction,
    old: &ReadTransaction,
    bodies: Option<&ReadTransaction>,
) -> StateResult<LostRows> {
    let known = |table| tables::open(copy, table);
    let unknown = |table| {
        let known = known(table)?;
        count(&tables::open(old, table)?, |key| Ok(known.get(key).or_fault()?.is_none()))
    };
    let (recent, archived) = (known(tables::REQUESTS)?, known(tables::ARCHIVE)?);
    let is_new = |key: &[u8]| -> StateResult<bool> {
        Ok(recent.get(key).or_fault()?.is_none() && archived.get(key).or_fault()?.is_none())
    };
    let requests = tables::open(old, tables::REQUESTS)?;
    let mut lost = count(&requests, is_new)?;
    if let Some(bodies) = bodies {
        // A request on its way into the archive lies in both tables.
        let only_archived =
            |key: &[u8]| Ok(requests.get(key).or_fault()?.is_none() && is_new(key)?);
        lost += count(&tables::open(bodies, tables::ARCHIVE)?, only_archived)?;
    }
    Ok(LostRows {
        accounts: unknown(tables::ACCOUNTS)?,
        credentials: unknown(tables::CREDENTIALS)?,
        requests: lost,
    })
}

fn count(table: &ReadOnly, wanted: impl Fn(&[u8]) -> StateResult<bool>) -> StateResult<u64> {
    let mut count = 0;
    for pair in table.iter().or_fault()? {
        let (key, _) = pair.or_fault()?;
        count += u64::from(wanted(key.value())?);
    }
    Ok(count)
}

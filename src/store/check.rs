//! Feeds everything stored to the audit.

use super::AuditReport;
use super::codec::Field;
use super::rows::Progress;
use super::snapshot::Snapshot;
use super::tables::{self, ReadOnly, get};
use crate::ids::AccountId;
use crate::ledger::audit::Audit;
use crate::ledger::state::{Granted, Head, Reservation, StateError};
use crate::ledger::{Account, Application, Balances, Credential, Entry, RequestRecord};
use uuid::Uuid;

/// Checks every invariant. A damaged row is a violation as well; an error means that nothing can be said.
pub(super) fn audit(snapshot: &Snapshot) -> Result<AuditReport, StateError> {
    let mut report = AuditReport::default();
    let mut audit = Audit::default();
    let head = match feed(snapshot, &mut audit, &mut report) {
        Ok(head) => head,
        Err(StateError::Corrupt(what)) => {
            audit.damaged(what);
            Head::default()
        }
        Err(error) => return Err(error),
    };
    report.violations = audit.finish(head);
    report.ok = report.violations.is_empty();
    Ok(report)
}

fn feed(snapshot: &Snapshot, audit: &mut Audit, report: &mut AuditReport) -> Result<Head, StateError> {
    let table = |table| snapshot.table(table);
    report.accounts = each(&table(tables::ACCOUNTS)?, audit, |audit, key, row: Account| {
        audit.place(key == row.id.0.as_bytes(), "an account");
        audit.account(row);
    })?;
    each(&table(tables::BALANCES)?, audit, |audit, key, row: Balances| {
        audit.balances(account_of(key), row);
    })?;
    each(&table(tables::APPLICATIONS)?, audit, |audit, key, row: Application| {
        audit.place(key == row.id.0.as_bytes(), "an application");
        audit.application(&row);
    })?;
    report.credentials = feed_credentials(snapshot, audit)?;
    each(&table(tables::GRANTS)?, audit, |audit, key, row: Granted| {
        let reference = key.get(16..).unwrap_or_default();
        let reference = String::from_utf8_lossy(reference).into_owned();
        audit.granted(account_of(key), reference, row);
    })?;
    report.requests = feed_requests(snapshot, audit)?;
    report.reservations = each(&table(tables::RESERVATIONS)?, audit, |audit, key, row: Reservation| {
        audit.place(key == tables::request_key(&row.key), "a reservation");
        audit.reservation(row);
    })?;
    report.entries = feed_entries(snapshot, audit)?;
    let progress: Option<Progress> = get(&table(tables::META)?, tables::PROGRESS)?;
    Ok(progress.unwrap_or_default().head)
}

fn feed_credentials(snapshot: &Snapshot, audit: &mut Audit) -> Result<u64, StateError> {
    let credentials = snapshot.table(tables::CREDENTIALS)?;
    let digests = snapshot.table(tables::DIGESTS)?;
    each(&credentials, audit, |audit, key, row: Credential| {
        audit.place(key == row.id.0.as_bytes(), "a credential");
        let indexed = get(&digests, &row.digest);
        let found = indexed.is_ok_and(|id| id == Some(row.id));
        audit.credential(&row, found.then_some(&row));
    })
}

/// Recent and archived ones; a request on its way from one to the other is counted once.
fn feed_requests(snapshot: &Snapshot, audit: &mut Audit) -> Result<u64, StateError> {
    for table in [snapshot.table(tables::REQUESTS)?, snapshot.archive()?] {
        each(&table, audit, |audit, key, row: RequestRecord| {
            audit.place(key == tables::request_key(&row.key), "a request");
            audit.request(row);
        })?;
    }
    Ok(audit.requests())
}

fn feed_entries(snapshot: &Snapshot, audit: &mut Audit) -> Result<u64, StateError> {
    let places = snapshot.table(tables::ENTRIES_BY_ACCOUNT)?;
    let entries = snapshot.table(tables::ENTRIES)?;
    each(&entries, audit, |audit, key, row: Entry| {
        audit.place(key == row.sequence.to_be_bytes(), "an entry");
        let place = tables::entry_key(row.account, row.sequence);
        let indexed = get::<()>(&places, &place).is_ok_and(|found| found.is_some());
        audit.place(indexed, "an account's entry");
        audit.entry(&row);
    })
}

/// Feeds every readable row and reports the others; the number of rows.
fn each<T: Field>(
    table: &ReadOnly,
    audit: &mut Audit,
    mut feed: impl FnMut(&mut Audit, &[u8], T),
) -> Result<u64, StateError> {
    let mut count = 0;
    for row in tables::rows::<T>(table)? {
        count += 1;
        match row {
            Ok((key, row)) => feed(audit, &key, row),
            Err(StateError::Corrupt(what)) => audit.damaged(what),
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

fn account_of(key: &[u8]) -> AccountId {
    let bytes = key.first_chunk().copied().unwrap_or_default();
    AccountId(Uuid::from_bytes(bytes))
}

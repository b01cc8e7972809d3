//! A snapshot as the audit reads it, row by row.

use super::bodies;
use super::codec::StoredField;
use super::rows::JournalPosition;
use super::snapshot::EmbeddedSnapshot;
use super::tables::{self, Definition, ReadOnly, due_key, get, request_key};
use crate::ids::{AccountId, ApplicationId, CredentialId};
use crate::ledger::audit::{self, AuditSource, JournalChain, JournalHeads, RowIter};
use crate::ledger::state::{Granted, JournalHead, Reservation, StateError, StateResult};
use crate::ledger::{
    Account, Application, Balances, Credential, JournalEntry, RequestKey, RequestRecord,
};
use redb::ReadableTableMetadata;
use std::iter;
use std::ops::Bound;
use uuid::Uuid;

impl EmbeddedSnapshot {
    /// Returns every row of a table. A row is damaged if its content belongs under another key.
    fn placed<T: StoredField + 'static>(
        &self,
        table: Definition,
        key: impl Fn(&T) -> Vec<u8> + 'static,
    ) -> RowIter<'_, T> {
        placed(&self.table(table)?, "", key)
    }
}

/// Returns the rows whose keys begin with `prefix`. A row is damaged if its content belongs under
/// another key.
fn placed<T: StoredField + 'static>(
    table: &ReadOnly,
    prefix: impl AsRef<[u8]>,
    key: impl Fn(&T) -> Vec<u8> + 'static,
) -> RowIter<'static, T> {
    let rows = tables::under::<T>(table, prefix.as_ref())?;
    Ok(Box::new(rows.map(move |row| {
        let (found, row) = row?;
        let right = key(&row) == found;
        let misplaced = || {
            StateError::Corrupt(format!(
                "it is not where it belongs, under key {}",
                hex::encode(found)
            ))
        };
        right.then_some(row).ok_or_else(misplaced)
    })))
}

impl AuditSource for EmbeddedSnapshot {
    fn accounts(&self) -> RowIter<'_, Account> {
        self.placed(tables::ACCOUNTS, |row: &Account| row.id.0.into_bytes().to_vec())
    }

    fn all_balances(&self) -> RowIter<'_, (AccountId, Balances)> {
        let rows = tables::under(&self.table(tables::BALANCES)?, b"")?;
        Ok(Box::new(rows.map(|row| row.map(|(key, balances)| (account_of(&key), balances)))))
    }

    fn applications(&self) -> RowIter<'_, Application> {
        self.placed(tables::APPLICATIONS, |row: &Application| row.id.0.into_bytes().to_vec())
    }

    fn credentials(&self) -> RowIter<'_, Credential> {
        self.placed(tables::CREDENTIALS, |row: &Credential| row.id.0.into_bytes().to_vec())
    }

    fn grants(&self) -> RowIter<'_, (AccountId, String, Granted)> {
        let rows = tables::under(&self.table(tables::GRANTS)?, b"")?;
        Ok(Box::new(rows.map(|row| {
            row.map(|(key, granted)| {
                let reference = key.get(16..).unwrap_or_default();
                (account_of(&key), String::from_utf8_lossy(reference).into_owned(), granted)
            })
        })))
    }

    fn requests(&self) -> RowIter<'_, RequestRecord> {
        let own_key = |record: &RequestRecord| request_key(&record.key);
        let requests = self.table(tables::REQUESTS)?;
        let recent = placed(&requests, "", own_key)?;
        // A request that is being moved into the archive lies in both tables with the same content.
        let index = self.archive_index()?;
        let archived = placed(&self.archive()?, "", own_key)?.filter_map(move |row| {
            let check = |record: RequestRecord| {
                let key = request_key(&record.key);
                let due = record.latest().finished_at.map(|at| due_key(at, &key));
                if due.map(|due| get::<()>(&index, &due)).transpose()?.flatten().is_none() {
                    return Err(StateError::Corrupt(format!(
                        "{} is archived and never forgotten",
                        record.key
                    )));
                }
                match get::<RequestRecord>(&requests, &key)? {
                    None => Ok(Some(record)),
                    Some(recent) if recent == record => Ok(None),
                    Some(_) => Err(audit::conflicting_duplicate(&record.key)),
                }
            };
            row.and_then(check).transpose()
        });
        Ok(Box::new(recent.chain(archived)))
    }

    fn reservations(&self) -> RowIter<'_, Reservation> {
        self.placed(tables::RESERVATIONS, |row: &Reservation| request_key(&row.key))
    }

    fn reservations_of(&self, account: AccountId) -> RowIter<'_, Reservation> {
        placed(&self.table(tables::RESERVATIONS)?, account.0.as_bytes(), |row: &Reservation| {
            request_key(&row.key)
        })
    }

    /// The journal is one chain over all accounts.
    fn chain_of(&self, _: AccountId) -> JournalChain {
        JournalChain::Shared
    }

    fn heads(&self) -> RowIter<'_, (JournalChain, JournalHead)> {
        let position: Option<JournalPosition> = self.row(tables::META, tables::PROGRESS)?;
        let head = position.unwrap_or_default().head;
        Ok(Box::new(iter::once(Ok((JournalChain::Shared, head)))))
    }

    fn entries(&self, after: &JournalHeads) -> RowIter<'_, JournalEntry> {
        let places = self.table(tables::ENTRIES_BY_ACCOUNT)?;
        let own_key = |entry: &JournalEntry| entry.sequence.to_be_bytes();
        let from = after.of(JournalChain::Shared).sequence.to_be_bytes();
        let rows = tables::range(
            &self.table(tables::ENTRIES)?,
            (Bound::Excluded(&from[..]), Bound::Unbounded),
        )?;
        Ok(Box::new(rows.map(move |row| {
            let (key, entry): (Vec<u8>, JournalEntry) = row?;
            let place = get::<()>(&places, &tables::entry_key(entry.account, entry.sequence))?;
            let right = own_key(&entry) == *key && place.is_some();
            right.then_some(entry).ok_or_else(|| {
                StateError::Corrupt(format!("entry {} is not where it belongs", hex::encode(key)))
            })
        })))
    }

    fn set_back_after(&self, _: JournalChain) -> StateResult<Vec<u64>> {
        Ok(self.row(tables::META, tables::SET_BACK)?.unwrap_or_default())
    }

    fn row_count(&self) -> StateResult<u64> {
        let mut rows = 0;
        for table in [
            tables::ACCOUNTS,
            tables::BALANCES,
            tables::APPLICATIONS,
            tables::CREDENTIALS,
            tables::RESERVATIONS,
            tables::REQUESTS,
            tables::GRANTS,
            tables::ENTRIES,
        ] {
            rows += self.table(table)?.len()?;
        }
        // Each archived request is read once by itself and once from its index.
        rows += 2 * self.archive()?.len()?;
        Ok(rows + tables::open(&self.bodies, tables::BODIES)?.len()?)
    }

    fn answers(&self) -> RowIter<'_, ()> {
        let open = |table| tables::open(&self.bodies, table);
        bodies::audited(&open(tables::BODIES)?, open(tables::ANSWER_BYTES)?)
    }

    fn index_rows(&self) -> RowIter<'_, ()> {
        let archive = self.archive()?;
        let index = self.archive_index()?;
        Ok(Box::new(tables::under::<()>(&index, b"")?.map(move |row| {
            let (due, ()) = row?;
            let found = archive.get(tables::due_subject(&due))?.is_some();
            found.then_some(()).ok_or_else(|| {
                StateError::Corrupt(format!("the archived request of {} is gone", hex::encode(due)))
            })
        })))
    }

    fn recent_balances(&self, account: AccountId) -> StateResult<Option<Balances>> {
        let last = AuditSource::entry_of(self, account, u64::MAX)?;
        Ok(Some(last.map_or_else(Balances::default, |last| last.after)))
    }

    fn account(&self, id: AccountId) -> StateResult<Option<Account>> {
        self.row(tables::ACCOUNTS, id.0.as_bytes())
    }

    fn balances(&self, id: AccountId) -> StateResult<Balances> {
        Ok(self.row(tables::BALANCES, id.0.as_bytes())?.unwrap_or_default())
    }

    fn application(&self, id: ApplicationId) -> StateResult<Option<Application>> {
        self.row(tables::APPLICATIONS, id.0.as_bytes())
    }

    fn credential_by_digest(&self, digest: &[u8; 32]) -> StateResult<Option<Credential>> {
        let Some(id) = get::<CredentialId>(&self.table(tables::DIGESTS)?, digest)? else {
            return Ok(None);
        };
        self.row(tables::CREDENTIALS, id.0.as_bytes())
    }

    fn granted(&self, account: AccountId, reference: &str) -> StateResult<Option<Granted>> {
        self.row(tables::GRANTS, &tables::grant_key(account, reference))
    }

    fn request(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>> {
        let key = request_key(key);
        match self.row(tables::REQUESTS, &key)? {
            Some(record) => Ok(Some(record)),
            None => get(&self.archive()?, &key),
        }
    }

    fn reservation(&self, key: &RequestKey) -> StateResult<Option<Reservation>> {
        self.row(tables::RESERVATIONS, &request_key(key))
    }

    fn entry(&self, _: JournalChain, sequence: u64) -> StateResult<Option<JournalEntry>> {
        self.row(tables::ENTRIES, &sequence.to_be_bytes())
    }

    fn entry_of(&self, account: AccountId, until: u64) -> StateResult<Option<JournalEntry>> {
        let places = self.table(tables::ENTRIES_BY_ACCOUNT)?;
        let (first, last) = (tables::entry_key(account, 0), tables::entry_key(account, until));
        let Some(place) = places.range(first.as_slice()..=last.as_slice())?.next_back() else {
            return Ok(None);
        };
        let sequence = place?.0.value().last_chunk().copied().unwrap_or_default();
        AuditSource::entry(self, JournalChain::Shared, u64::from_be_bytes(sequence))
    }
}

fn account_of(key: &[u8]) -> AccountId {
    let bytes = key.first_chunk().copied().unwrap_or_default();
    AccountId(Uuid::from_bytes(bytes))
}

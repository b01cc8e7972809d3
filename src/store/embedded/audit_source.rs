//! A snapshot as the audit reads it, row by row.

use super::bodies;
use super::snapshot::EmbeddedSnapshot;
use super::tables::{self, Definition, OrFault, ReadOnly, due_key, get, request_key};
use crate::codec::StoredField;
use cresset_base::{AccountId, ApplicationId};
use cresset_ledger::audit::{self, AuditSource, JournalChain, JournalHeads, RowIter};
use cresset_ledger::{
    Account, Adjustment, Application, Balances, Credential, JournalEntry, JournalHead, RequestKey,
    RequestRecord, Reservation, StateError, StateResult,
};
use redb::ReadableTableMetadata;
use std::iter;
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

/// The rows of an index by time: an `Err` for each whose subject is not in `subjects`.
fn leading_to(
    index: &ReadOnly,
    subjects: ReadOnly,
    what: &'static str,
) -> StateResult<impl Iterator<Item = StateResult<()>> + use<>> {
    Ok(tables::under::<()>(index, b"")?.map(move |row| {
        let (due, ()) = row?;
        let found = subjects.get(tables::due_subject(&due)).or_fault()?.is_some();
        if !found {
            let due = hex::encode(due);
            return Err(StateError::Corrupt(format!("the {what} of {due} is gone")));
        }
        Ok(())
    }))
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

    fn grants(&self) -> RowIter<'_, (AccountId, String, Adjustment)> {
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
                    let why = format!("{} is archived and never forgotten", record.key);
                    return Err(StateError::Corrupt(why));
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
        Ok(Box::new(iter::once(Ok((JournalChain::Shared, self.head()?)))))
    }

    fn entries(&self, after: &JournalHeads) -> RowIter<'_, JournalEntry> {
        self.journal_after(after.of(JournalChain::Shared).sequence)
    }

    fn set_back_after(&self, _: JournalChain) -> StateResult<Vec<u64>> {
        Ok(self.row(tables::META, tables::SET_BACK)?.unwrap_or_default())
    }

    fn misses_uses(&self, _: AccountId) -> StateResult<bool> {
        Ok(self.row::<()>(tables::META, tables::MISSES_USES)?.is_some())
    }

    fn row_count(&self) -> StateResult<u64> {
        let mut rows = self.head()?.sequence;
        for table in [
            tables::ACCOUNTS,
            tables::BALANCES,
            tables::APPLICATIONS,
            tables::CREDENTIALS,
            tables::RESERVATIONS,
            tables::REQUESTS,
            tables::GRANTS,
        ] {
            rows += self.table(table)?.len().or_fault()?;
        }
        // Each archived request is read once by itself and once from its index.
        rows += 2 * self.archive()?.len().or_fault()?;
        Ok(rows + tables::open(&self.bodies, tables::BODIES)?.len().or_fault()?)
    }

    fn answers(&self) -> RowIter<'_, ()> {
        let open = |table| tables::open(&self.bodies, table);
        bodies::audited(&open(tables::BODIES)?, open(tables::ANSWER_BYTES)?)
    }

    fn index_rows(&self) -> RowIter<'_, ()> {
        let archived = leading_to(&self.archive_index()?, self.archive()?, "archived request")?;
        let open = |table| tables::open(&self.bodies, table);
        let answers = leading_to(&open(tables::BODIES_DUE)?, open(tables::BODIES)?, "answer")?;
        Ok(Box::new(archived.chain(answers)))
    }

    fn closed_parts(&self) -> RowIter<'_, ()> {
        let mut end = 0;
        Ok(Box::new(self.closed_after(0)?.into_iter().map(move |segment| {
            let follows = segment.first == end + 1;
            end = segment.last.sequence;
            if !follows {
                let what = format!("{segment} does not follow the closed part before it");
                return Err(StateError::Corrupt(what));
            }
            self.segments()?.check(&segment)
        })))
    }

    fn recent_balances(&self, account: AccountId) -> StateResult<Option<Balances>> {
        match self.last_of(account, u64::MAX, false)? {
            Some(last) => Ok(self.journal_entry(last)?.map(|last| last.after)),
            None => Ok(self.last_closed()?.is_none().then(Balances::default)),
        }
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
        self.credential_with(digest)
    }

    fn adjustment(&self, account: AccountId, reference: &str) -> StateResult<Option<Adjustment>> {
        self.row(tables::GRANTS, &tables::grant_key(account, reference))
    }

    fn request(&self, key: &RequestKey) -> StateResult<Option<RequestRecord>> {
        self.request_at(key)
    }

    fn reservation(&self, key: &RequestKey) -> StateResult<Option<Reservation>> {
        self.row(tables::RESERVATIONS, &request_key(key))
    }

    fn entry(&self, _: JournalChain, sequence: u64) -> StateResult<Option<JournalEntry>> {
        self.journal_entry(sequence)
    }

    fn entry_of(&self, account: AccountId, until: u64) -> StateResult<Option<JournalEntry>> {
        match self.last_of(account, until, true)? {
            Some(sequence) => self.journal_entry(sequence),
            None => Ok(None),
        }
    }
}

fn account_of(key: &[u8]) -> AccountId {
    let bytes = key.first_chunk().copied().unwrap_or_default();
    AccountId(Uuid::from_bytes(bytes))
}

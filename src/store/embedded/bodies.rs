//! Stored answers. They are kept for replays until they expire, and the bytes that each account's
//! take are summed as they come and go.

use super::files::Files;
use super::tables::{self, OrFault, ReadOnly, Writable, due_key, get, put};
use crate::StoredBody;
use crate::codec;
use crate::queue::WriteAction;
use cresset_base::{AccountId, RequestId, UnixMillis, failpoint};
use cresset_ledger::audit::RowIter;
use cresset_ledger::{Account, RequestKey, Reservation, StateError, StateResult};
use redb::{Database, ReadableDatabase, ReadableTable, WriteTransaction};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::iter;
use std::ops::Bound;
use std::rc::Rc;
use uuid::Uuid;

/// Answers removed in one transaction, which the writer may have to wait for.
const MAX_ERASED: usize = 1_000;

/// Begins a transaction on `bodies.redb`. With it the commit stores which pages are in use, and is
/// made in two phases: after a kill the file is open at once, where the database would otherwise
/// read all of it. That costs one more sync a commit.
pub(super) fn begin(bodies: &Database) -> StateResult<WriteTransaction> {
    let mut txn = bodies.begin_write().or_fault()?;
    txn.set_quick_repair(true);
    Ok(txn)
}

/// One durable transaction on `bodies.redb`, abandoned when `change` fails.
pub(super) fn write(
    bodies: &Database,
    change: impl FnOnce(&WriteTransaction) -> StateResult,
) -> StateResult {
    let txn = begin(bodies)?;
    change(&txn)?;
    txn.commit().or_fault()
}

/// Makes the bodies among the actions durable, in one transaction of their own. Those of accounts
/// that store no answers are left out: this is the one place that stores any.
pub(super) fn write_all(files: &Files, actions: &[&WriteAction]) -> StateResult {
    let bodies: Vec<_> = actions.iter().filter_map(|action| action.body.as_ref()).collect();
    let bodies = without_unstored(files, bodies)?;
    if bodies.is_empty() {
        return Ok(());
    }
    write(&files.bodies, |txn| {
        let (mut answers, mut due) =
            (AnswerTable::open(txn)?, txn.open_table(tables::BODIES_DUE).or_fault()?);
        bodies.iter().try_for_each(|(key, body)| {
            let key = tables::request_key(key);
            if let Some(replaced) = answers.get(&key)? {
                due.remove(due_key(replaced.expires_at, &key).as_slice()).or_fault()?;
            }
            answers.put(&key, body)?;
            put(&mut due, &due_key(body.expires_at, &key), &())
        })
    })?;
    failpoint!("store::body_stored");
    Ok(())
}

type Body = (RequestKey, StoredBody);

/// The bodies of accounts that store answers.
fn without_unstored<'a>(files: &Files, mut bodies: Vec<&'a Body>) -> StateResult<Vec<&'a Body>> {
    if bodies.is_empty() {
        return Ok(bodies);
    }
    let accounts = tables::open(&files.ledger.begin_read().or_fault()?, tables::ACCOUNTS)?;
    let mut stores = HashMap::new();
    for (key, _) in &bodies {
        let account: Option<Account> = get(&accounts, key.account.0.as_bytes())?;
        stores.insert(key.account, account.is_none_or(|account| account.stores_answers));
    }
    bodies.retain(|(key, _)| stores[&key.account]);
    Ok(bodies)
}

/// Removes up to `MAX_ERASED` answers of an account, or of its requests with one id. Returns how
/// many there were.
pub(super) fn erase(
    database: &Database,
    account: AccountId,
    request: Option<RequestId>,
) -> StateResult<u64> {
    let keys = some_of(database, account, request)?;
    if keys.is_empty() {
        return Ok(0);
    }
    write(database, |txn| {
        let (mut answers, mut due) =
            (AnswerTable::open(txn)?, txn.open_table(tables::BODIES_DUE).or_fault()?);
        for key in &keys {
            // A sweep may have removed it meanwhile.
            let Some(body) = answers.get(key)? else { continue };
            due.remove(due_key(body.expires_at, key).as_slice()).or_fault()?;
            answers.remove(key)?;
        }
        Ok(())
    })?;
    Ok(keys.len() as u64)
}

/// The keys of up to `MAX_ERASED` answers.
fn some_of(
    database: &Database,
    account: AccountId,
    request: Option<RequestId>,
) -> StateResult<Vec<Vec<u8>>> {
    let prefix = match request {
        Some(request) => tables::request_prefix(account, request),
        None => account.0.into_bytes().to_vec(),
    };
    let stored = tables::open(&database.begin_read().or_fault()?, tables::BODIES)?;
    let found = tables::under::<StoredBody>(&stored, &prefix)?.take(MAX_ERASED);
    found.map(|row| Ok(row?.0)).collect()
}

/// The answers in an open transaction, with the sum of each account's.
pub(super) struct AnswerTable<'t> {
    bodies: Writable<'t>,
    sums: Writable<'t>,
}

impl<'t> AnswerTable<'t> {
    pub(super) fn open(txn: &'t WriteTransaction) -> StateResult<Self> {
        let (bodies, sums) = (tables::BODIES, tables::ANSWER_BYTES);
        Ok(Self {
            bodies: txn.open_table(bodies).or_fault()?,
            sums: txn.open_table(sums).or_fault()?,
        })
    }

    pub(super) fn get(&self, key: &[u8]) -> StateResult<Option<StoredBody>> {
        get(&self.bodies, key)
    }

    /// Stores an answer in place of an earlier one of the same request.
    pub(super) fn put(&mut self, key: &[u8], body: &StoredBody) -> StateResult {
        let before = self.size(key)?;
        put(&mut self.bodies, key, body)?;
        let size = self.size(key)?;
        self.count(key, size, before)
    }

    pub(super) fn remove(&mut self, key: &[u8]) -> StateResult {
        let size = self.size(key)?;
        self.bodies.remove(key).or_fault()?;
        self.count(key, 0, size)
    }

    /// Bytes of a row; 0 when there is none.
    fn size(&self, key: &[u8]) -> StateResult<u64> {
        Ok(self.bodies.get(key).or_fault()?.map_or(0, |row| row.value().len() as u64))
    }

    fn count(&mut self, key: &[u8], added: u64, removed: u64) -> StateResult {
        if added == removed {
            return Ok(());
        }
        let account = account_of(key);
        let before: u64 = get(&self.sums, account)?.unwrap_or_default();
        let after = (before + added).checked_sub(removed).ok_or_else(|| {
            StateError::Corrupt(format!(
                "the answers of account {} take more than their sum",
                hex::encode(account)
            ))
        })?;
        if after == 0 {
            self.sums.remove(account).or_fault()?;
            return Ok(());
        }
        put(&mut self.sums, account, &after)
    }
}

/// The account part of a request key.
fn account_of(key: &[u8]) -> &[u8] {
    key.get(..16).unwrap_or(key)
}

/// Bytes of answers by account.
type Sums = BTreeMap<Vec<u8>, u64>;

fn add(sums: &mut Sums, key: &[u8], row: &[u8]) {
    *sums.entry(account_of(key).to_vec()).or_default() += row.len() as u64;
}

/// The answers, one by one, then the sums that are not those of their account's answers.
pub(super) fn audited(bodies: &ReadOnly, stored: ReadOnly) -> RowIter<'static, ()> {
    let counted = Rc::new(RefCell::new(Sums::new()));
    let counts = counted.clone();
    let all = (Bound::Unbounded, Bound::Unbounded);
    let answers = tables::range_with(bodies, all, move |key, row| {
        add(&mut counts.borrow_mut(), key, row);
        codec::decode::<StoredBody>(key, row).map(drop)
    })?;
    let wrong = iter::once_with(move || wrong_sums(counted.take(), &stored));
    let wrong = wrong.flat_map(|wrong| match wrong {
        Ok(wrong) => wrong.into_iter().map(|what| Err(StateError::Corrupt(what))).collect(),
        Err(error) => vec![Err(error)],
    });
    Ok(Box::new(answers.chain(wrong)))
}

fn wrong_sums(mut counted: Sums, stored: &ReadOnly) -> StateResult<Vec<String>> {
    let mut wrong = Vec::new();
    let mut compare = |account: &[u8], stored: u64, counted: u64| {
        if stored != counted {
            let account = Uuid::from_slice(account).unwrap_or_default();
            wrong.push(format!(
                "account {account} has answers of {counted} bytes, and {stored} are recorded"
            ));
        }
    };
    for row in tables::under::<u64>(stored, b"")? {
        let (account, sum) = row?;
        compare(&account, sum, counted.remove(&account).unwrap_or_default());
    }
    for (account, sum) in counted {
        compare(&account, 0, sum);
    }
    Ok(wrong)
}

/// Removes the answers of requests that hold a reservation: their settlement never came. It must
/// run while no request does.
pub(super) fn remove_orphans(files: &Files) -> StateResult {
    let reservations = tables::open(&files.ledger.begin_read().or_fault()?, tables::RESERVATIONS)?;
    let stored = tables::open(&files.bodies.begin_read().or_fault()?, tables::BODIES)?;
    let mut orphans = Vec::new();
    for row in tables::under::<Reservation>(&reservations, b"")? {
        let (key, _) = row?;
        let body: Option<StoredBody> = get(&stored, &key)?;
        orphans.extend(body.map(|body| (due_key(body.expires_at, &key), key)));
    }
    if orphans.is_empty() {
        return Ok(());
    }
    write(&files.bodies, |txn| {
        let mut answers = AnswerTable::open(txn)?;
        let mut index = txn.open_table(tables::BODIES_DUE).or_fault()?;
        orphans.iter().try_for_each(|(due, key)| {
            index.remove(due.as_slice()).or_fault()?;
            answers.remove(key)
        })
    })
}

/// The body stored for a request, unless it has expired.
pub(super) fn read(
    files: &Files,
    key: &RequestKey,
    now: UnixMillis,
) -> StateResult<Option<StoredBody>> {
    let txn = files.bodies.begin_read().or_fault()?;
    let bodies = tables::open(&txn, tables::BODIES)?;
    let body: Option<StoredBody> = get(&bodies, &tables::request_key(key))?;
    Ok(body.filter(|body| now < body.expires_at))
}

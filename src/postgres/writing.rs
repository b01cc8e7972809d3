//! The second round trip of a transaction: it writes what the commands changed, and commits.

use super::keys::RequestColumns;
use super::rows::{AccountRates, AccountRow, BatchRows};
use super::session::Ask;
use cresset_base::AccountId;
use cresset_ledger::{
    Balance, Bucket, Command, EntryKind, JournalEntry, Microcredits, RequestKey, RequestRecord,
    Reservation,
};
use cresset_store::codec::{StoredField, encode};
use cresset_store::rows::{crash_key, entry_key, grant_key, request_key};
use cresset_store::{StoredBody, WriteAction};
use std::collections::{BTreeMap, HashSet};
use uuid::Uuid;

/// What batches of requests change, in one statement, which costs both sides less than five.
const PUT_ALL: &str = "with changed as (update accounts a set in_flight = u.in_flight, \
    trial_credited = u.c1, trial_debited = u.d1, trial_reserved = u.r1, \
    premium_credited = u.c2, premium_debited = u.d2, premium_reserved = u.r2, \
    sequence = u.sequence, clock = u.clock, row = u.row, rate_due = u.rate_due \
    from unnest($1::uuid[], $2::integer[], \
    $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[], \
    $9::bigint[], $10::bigint[], $11::bytea[], $12::bigint[]) \
    as u(id, in_flight, c1, d1, r1, c2, d2, r2, sequence, clock, row, rate_due) where a.id = u.id), \
    put as (insert into requests (account, request, application, fingerprint, \
    credential, boot, state, ended_at, row) select * from unnest($13::uuid[], $14::uuid[], \
    $15::uuid[], $16::bytea[], $17::uuid[], $18::uuid[], $19::smallint[], $20::bigint[], $21::bytea[]) \
    on conflict (account, request, application) do update set fingerprint = excluded.fingerprint, \
    credential = excluded.credential, boot = excluded.boot, state = excluded.state, \
    ended_at = excluded.ended_at, row = excluded.row), \
    reserved as (insert into reservations (account, request, application, attempt, \
    boot, row) select * from unnest($22::uuid[], $23::uuid[], $24::uuid[], $25::uuid[], $26::uuid[], \
    $27::bytea[]) on conflict (account, request, application) do update set \
    attempt = excluded.attempt, boot = excluded.boot, row = excluded.row), \
    ended as (delete from reservations q using unnest($28::uuid[], \
    $29::uuid[], $30::uuid[]) as k(account, request, application) where q.account = k.account \
    and q.request = k.request and q.application = k.application) \
    insert into entries (account, sequence, kind, attempt, at, row) \
    select * from unnest($31::uuid[], $32::bigint[], $33::smallint[], $34::uuid[], $35::bigint[], \
    $36::bytea[])";
const INSERT_ACCOUNTS: &str = "insert into accounts (id, in_flight, trial_credited, trial_debited, \
    trial_reserved, premium_credited, premium_debited, premium_reserved, sequence, clock, row, rate_due) \
    select * from unnest($1::uuid[], $2::integer[], $3::bigint[], $4::bigint[], $5::bigint[], \
    $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[], $10::bigint[], $11::bytea[], \
    $12::bigint[])";
const INSERT_APPLICATIONS: &str = "insert into applications (id, account, row) \
    select * from unnest($1::uuid[], $2::uuid[], $3::bytea[])";
const UPDATE_CREDENTIALS: &str = "update credentials c set row = u.row \
    from unnest($1::uuid[], $2::bytea[]) as u(id, row) where c.id = u.id";
const INSERT_CREDENTIALS: &str = "insert into credentials (id, account, digest, row) \
    select * from unnest($1::uuid[], $2::uuid[], $3::bytea[], $4::bytea[])";
const INSERT_GRANTS: &str = "insert into grants (account, reference, row) \
    select * from unnest($1::uuid[], $2::text[], $3::bytea[])";
const REMOVE_REQUESTS: &str = "delete from requests q using unnest($1::uuid[], $2::uuid[], \
    $3::uuid[]) as k(account, request, application) where q.account = k.account \
    and q.request = k.request and q.application = k.application";
const PUT_CRASHES: &str = "insert into crashes (account, fingerprint, at, row) \
    select * from unnest($1::uuid[], $2::bytea[], $3::bigint[], $4::bytea[]) \
    on conflict (account, fingerprint) do update set at = excluded.at, row = excluded.row";
const REMOVE_CRASHES: &str = "delete from crashes c using unnest($1::uuid[], $2::bytea[]) \
    as k(account, fingerprint) where c.account = k.account and c.fingerprint = k.fingerprint";
/// Counts the bytes of the answers that are stored, less those of the answers they replace.
const COUNT_ANSWERS: &str = "update accounts a set answer_bytes = a.answer_bytes + u.bytes from \
    (select k.account, sum(k.size - coalesce(b.size, 0))::bigint as bytes from unnest($1::uuid[], \
    $2::uuid[], $3::uuid[], $4::bigint[]) as k(account, request, application, size) \
    left join bodies b using (account, request, application) group by k.account) as u \
    where a.id = u.account";
const PUT_BODIES: &str = "insert into bodies (account, request, application, expires_at, size, \
    row) select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[], $5::bigint[], \
    $6::bytea[]) on conflict (account, request, application) do update set \
    expires_at = excluded.expires_at, size = excluded.size, row = excluded.row";
const COMMIT: &str = "commit";

/// The statements that write these rows and the answers of requests that are settled by them, the
/// commit last.
pub(super) fn writes(rows: &BatchRows, actions: &[&WriteAction]) -> Vec<Ask> {
    let mut asks = row_writes(rows);
    let bodies = settled_bodies(rows, actions);
    if !bodies.is_empty() {
        asks.extend(put_bodies(&bodies));
    }
    asks.push(Ask::new(COMMIT));
    asks
}

/// The statements that write these rows.
pub(super) fn row_writes(rows: &BatchRows) -> Vec<Ask> {
    let mut asks = Vec::new();
    let mut write = |ask: Ask, rows: usize| {
        if rows > 0 {
            asks.push(ask);
        }
    };
    let accounts = rows.accounts.inserted();
    write(put_accounts(Ask::new(INSERT_ACCOUNTS), &accounts, &rows.rates), accounts.len());
    put_owners(rows, &mut write);
    let (put, count) = put_all(rows);
    write(put, count);
    let removed = rows.requests.removed();
    write(scoped(Ask::new(REMOVE_REQUESTS), removed.iter().copied()), removed.len());
    put_crashes(rows, &mut write);
    asks
}

/// What batches of requests change, and the number of rows.
fn put_all(rows: &BatchRows) -> (Ask, usize) {
    let accounts = rows.accounts.updated();
    let (requests, reservations) = (rows.requests.put_rows(), rows.reservations.put_rows());
    let (ended, entries) = (rows.reservations.removed(), &rows.entries);
    let ask = put_accounts(Ask::new(PUT_ALL), &accounts, &rows.rates);
    let ask = put_reservations(put_requests(ask, &requests), &reservations);
    let ask = insert_entries(scoped(ask, ended.iter().copied()), entries);
    let changed = accounts.len() + requests.len() + reservations.len();
    (ask, changed + ended.len() + entries.len())
}

fn column<R, T>(rows: &[R], value: impl Fn(&R) -> T) -> Vec<T> {
    rows.iter().map(value).collect()
}

fn units(amount: Microcredits) -> i64 {
    i64::try_from(amount.get()).expect("invariant: amounts are below 2^53")
}

fn number(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn balance_of(row: &AccountRow, bucket: Bucket) -> &Balance {
    match bucket {
        Bucket::Trial => &row.balances.trial,
        Bucket::Premium => &row.balances.premium,
    }
}

fn put_accounts(ask: Ask, rows: &[(&AccountId, &AccountRow)], rates: &AccountRates) -> Ask {
    let amounts = |bucket: Bucket, part: fn(&Balance) -> Microcredits| {
        column(rows, |(_, row)| units(part(balance_of(row, bucket))))
    };
    let in_flight = |row: &AccountRow| i32::try_from(row.account.in_flight).unwrap_or(i32::MAX);
    ask.with(column(rows, |(id, _)| id.0))
        .with(column(rows, |(_, row)| in_flight(row)))
        .with(amounts(Bucket::Trial, |bucket| bucket.credited))
        .with(amounts(Bucket::Trial, |bucket| bucket.debited))
        .with(amounts(Bucket::Trial, |bucket| bucket.reserved))
        .with(amounts(Bucket::Premium, |bucket| bucket.credited))
        .with(amounts(Bucket::Premium, |bucket| bucket.debited))
        .with(amounts(Bucket::Premium, |bucket| bucket.reserved))
        .with(column(rows, |(_, row)| number(row.head.sequence)))
        .with(column(rows, |(_, row)| number(row.clock.0)))
        .with(column(rows, |(id, row)| encode(id.0.as_bytes(), *row)))
        .with(column(rows, |(id, _)| number(rates.get(id).copied().unwrap_or_default())))
}

/// Applications, credentials and grants.
fn put_owners(rows: &BatchRows, write: &mut impl FnMut(Ask, usize)) {
    let applications = rows.applications.inserted();
    let insert = Ask::new(INSERT_APPLICATIONS)
        .with(column(&applications, |(id, _)| id.0))
        .with(column(&applications, |(_, row)| row.account.0))
        .with(column(&applications, |(id, row)| encode(id.0.as_bytes(), *row)));
    write(insert, applications.len());
    let credentials = rows.credentials.updated();
    let update = Ask::new(UPDATE_CREDENTIALS)
        .with(column(&credentials, |(id, _)| id.0))
        .with(column(&credentials, |(id, row)| encode(id.0.as_bytes(), *row)));
    write(update, credentials.len());
    let credentials = rows.credentials.inserted();
    let insert = Ask::new(INSERT_CREDENTIALS)
        .with(column(&credentials, |(id, _)| id.0))
        .with(column(&credentials, |(_, row)| row.account.0))
        .with(column(&credentials, |(_, row)| row.digest.to_vec()))
        .with(column(&credentials, |(id, row)| encode(id.0.as_bytes(), *row)));
    write(insert, credentials.len());
    let grants = rows.adjustments.inserted();
    let insert = Ask::new(INSERT_GRANTS)
        .with(column(&grants, |((account, _), _)| account.0))
        .with(column(&grants, |((_, reference), _)| reference.clone()))
        .with(column(&grants, |((account, reference), row)| {
            encode(&grant_key(*account, reference), *row)
        }));
    write(insert, grants.len());
}

fn put_requests(ask: Ask, rows: &[(&RequestKey, &RequestRecord)]) -> Ask {
    let ended = |record: &RequestRecord| record.latest().finished_at.map(|at| number(at.0));
    scoped(ask, rows.iter().map(|(key, _)| *key))
        .with(column(rows, |(_, row)| row.fingerprint.to_vec()))
        .with(column(rows, |(_, row)| row.latest().credential.0))
        .with(column(rows, |(_, row)| row.latest().boot.0))
        .with(column(rows, |(_, row)| row.latest().state as i16))
        .with(column(rows, |(_, row)| ended(row)))
        .with(sealed(rows))
}

fn put_reservations(ask: Ask, rows: &[(&RequestKey, &Reservation)]) -> Ask {
    scoped(ask, rows.iter().map(|(key, _)| *key))
        .with(column(rows, |(_, row)| row.attempt.0))
        .with(column(rows, |(_, row)| row.boot.0))
        .with(sealed(rows))
}

fn scoped<'a>(ask: Ask, keys: impl Iterator<Item = &'a RequestKey>) -> Ask {
    let RequestColumns { accounts, requests, applications } = keys.collect();
    ask.with(accounts).with(requests).with(applications)
}

fn sealed<T: StoredField>(rows: &[(&RequestKey, &T)]) -> Vec<Vec<u8>> {
    column(rows, |(key, row)| encode(&request_key(key), *row))
}

fn insert_entries(ask: Ask, entries: &[JournalEntry]) -> Ask {
    ask.with(column(entries, |entry| entry.account.0))
        .with(column(entries, |entry| number(entry.sequence)))
        .with(column(entries, |entry| kind(entry).0))
        .with(column(entries, |entry| kind(entry).1))
        .with(column(entries, |entry| number(entry.at.0)))
        .with(column(entries, |entry| encode(&entry_key(entry.account, entry.sequence), entry)))
}

/// An entry's kind as the indexes of the table know it, and its attempt.
pub(super) fn kind(entry: &JournalEntry) -> (i16, Option<Uuid>) {
    match entry.kind {
        EntryKind::Grant { .. } => (0, None),
        EntryKind::Reserve { attempt, .. } => (1, Some(attempt.0)),
        EntryKind::Settle { attempt, .. } => (2, Some(attempt.0)),
        EntryKind::Release { attempt, .. } => (3, Some(attempt.0)),
        EntryKind::Debit { .. } => (4, None),
    }
}

fn put_crashes(rows: &BatchRows, write: &mut impl FnMut(Ask, usize)) {
    let crashes = rows.crashes.put_rows();
    let put = Ask::new(PUT_CRASHES)
        .with(column(&crashes, |((account, _), _)| account.0))
        .with(column(&crashes, |((_, fingerprint), _)| fingerprint.to_vec()))
        .with(column(&crashes, |(_, row)| number(row.at.0)))
        .with(column(&crashes, |((account, fingerprint), row)| {
            encode(&crash_key(*account, fingerprint), *row)
        }));
    write(put, crashes.len());
    let removed = rows.crashes.removed();
    let remove = Ask::new(REMOVE_CRASHES)
        .with(column(&removed, |(account, _)| account.0))
        .with(column(&removed, |(_, fingerprint)| fingerprint.to_vec()));
    write(remove, removed.len());
}

/// The answers among the actions whose requests this transaction settles, unless their accounts
/// store none. A repeated settlement finds its answer stored by the first one.
fn settled_bodies<'a>(
    rows: &BatchRows,
    actions: &[&'a WriteAction],
) -> BTreeMap<RequestKey, &'a StoredBody> {
    let settled: HashSet<_> = rows.entries.iter().filter_map(JournalEntry::settlement).collect();
    let mut bodies = BTreeMap::new();
    for action in actions {
        let Command::Settle { key, attempt, .. } = &action.command else { continue };
        let owner = rows.accounts.sound(&key.account);
        let stores = owner.is_some_and(|row| row.account.stores_answers);
        if let Some((_, body)) = action.body.as_ref().filter(|_| stores)
            && settled.contains(&(*key, *attempt))
        {
            bodies.entry(*key).or_insert(body);
        }
    }
    bodies
}

fn put_bodies(bodies: &BTreeMap<RequestKey, &StoredBody>) -> [Ask; 2] {
    let rows: Vec<_> = bodies.iter().map(|(key, body)| (key, *body)).collect();
    let sealed = sealed(&rows);
    let sizes: Vec<i64> = column(&sealed, |row| row.len() as i64);
    let count = scoped(Ask::new(COUNT_ANSWERS), rows.iter().map(|(key, _)| *key)).with(sizes);
    [count, store_bodies(&rows, sealed)]
}

/// The statement that stores these answers, whose bytes are counted elsewhere.
pub(super) fn body_writes(rows: &[(&RequestKey, &StoredBody)]) -> Ask {
    store_bodies(rows, sealed(rows))
}

fn store_bodies(rows: &[(&RequestKey, &StoredBody)], sealed: Vec<Vec<u8>>) -> Ask {
    let sizes: Vec<i64> = column(&sealed, |row| row.len() as i64);
    let expiries: Vec<i64> = column(rows, |(_, body)| number(body.expires_at.0));
    scoped(Ask::new(PUT_BODIES), rows.iter().map(|(key, _)| *key))
        .with(expiries)
        .with(sizes)
        .with(sealed)
}

//! The first round trip of a transaction: it locks accounts and reads the rows that the commands
//! need. Every statement after the lock sees what was committed before the lock was had, because a
//! transaction at READ COMMITTED looks anew for each statement.

use super::failure::Failure;
use super::keys::{Keys, RequestColumns, request_at};
use super::rows::{BatchRows, content, fixed};
use super::session::{Ask, DatabaseSession, QueryAnswer};
use cresset_base::{AccountId, ApplicationId, BootId, CredentialId};
use cresset_ledger::RequestKey;
use cresset_store::rows::{crash_key, grant_key, request_key};
use std::collections::BTreeSet;
use tokio_postgres::Row;
use uuid::Uuid;

const BEGIN: &str = "begin";
/// Holds the node's row, so that whoever declares the node dead waits for this transaction.
const NODE: &str = "select state from nodes where boot = $1 for key share";
/// In one order for all, so that two transactions do not wait for each other.
const ACCOUNTS: &str = "select id, row, rate_due from accounts where id = any(array( \
    select unnest($1::uuid[]) union select account from credentials where id = any($2::uuid[]))) \
    order by id for update";
/// The same for accounts that can wait. A batch that waited for one of them would hold the others
/// meanwhile, and nodes would wait for each other in chains.
const OPTIONAL_ACCOUNTS: &str = "select id, row, rate_due from accounts \
    where id = any($1::uuid[]) order by id for update skip locked";
const DIGESTS: &str = "select id, row, digest from credentials where digest = any($1::bytea[])";
const APPLICATIONS: &str = "select id, row from applications where id = any($1::uuid[])";
const GRANTS: &str = "select account, reference, g.row from unnest($1::uuid[], $2::text[]) \
    as k(account, reference) join grants g using (account, reference)";
/// What batches of requests need, each row with the number of its table: one statement costs both
/// sides less than four.
const OF_REQUESTS: &str = "select 0::smallint, id, null::uuid, null::uuid, null::bytea, row \
    from credentials where id = any(array( \
    select unnest($1::uuid[]) union select q.credential \
    from unnest($2::uuid[], $3::uuid[], $4::uuid[]) as k(account, request, application) \
    join requests q using (account, request, application))) \
    union all select 1::smallint, account, request, application, null, q.row \
    from unnest($2::uuid[], $3::uuid[], $4::uuid[]) as k(account, request, application) \
    join requests q using (account, request, application) \
    union all select 2::smallint, account, request, application, null, q.row \
    from unnest($2::uuid[], $3::uuid[], $4::uuid[]) as k(account, request, application) \
    join reservations q using (account, request, application) \
    union all select 3::smallint, account, null, null, fingerprint, c.row from ( \
    select * from unnest($5::uuid[], $6::bytea[]) as k(account, fingerprint) \
    union select q.account, q.fingerprint \
    from unnest($2::uuid[], $3::uuid[], $4::uuid[]) as k(account, request, application) \
    join requests q using (account, request, application)) as i \
    join crashes c using (account, fingerprint)";
/// Reservations of boots that have ended for certain. The first of them in the order of their keys.
const FOREIGN: &str = "select account, request, application from reservations r \
    where boot <> $1 and not exists (select 1 from nodes n where n.boot = r.boot and n.state = 0) \
    order by account, request, application limit $2";

/// The state of a node's row while the node may admit.
pub(super) const ACTIVE: i16 = 0;

/// Begins a transaction and reads into `rows` what `keys` name. Returns whether the node of this
/// boot may admit.
pub(super) async fn begin(
    session: &DatabaseSession,
    boot: Option<BootId>,
    keys: &Keys,
    rows: &mut BatchRows,
) -> Result<bool, Failure> {
    let mut asks = vec![Ask::new(BEGIN)];
    asks.extend(boot.map(|boot| Ask::new(NODE).with(boot.0)));
    let before = asks.len();
    asks.extend(read_asks(keys));
    let mut answers = session.pipeline(asks).await?;
    let read = answers.split_off(before);
    take(keys, read, rows);
    let node = answers.pop().filter(|_| boot.is_some());
    let state = node.map(|node| node.rows.first().map(|row| row.get(0)));
    Ok(state.is_none_or(|state| state == Some(ACTIVE)))
}

/// Reads into `rows` what `keys` name, in the transaction that is open.
pub(super) async fn read(
    session: &DatabaseSession,
    keys: &Keys,
    rows: &mut BatchRows,
) -> Result<(), Failure> {
    let answers = session.pipeline(read_asks(keys)).await?;
    take(keys, answers, rows);
    Ok(())
}

/// The requests that hold reservations of boots that have ended, at most `limit` of them.
pub(super) async fn foreign(
    session: &DatabaseSession,
    boot: BootId,
    limit: usize,
) -> Result<Keys, Failure> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let found = session.ask(Ask::new(FOREIGN).with(boot.0).with(limit)).await?;
    let mut keys = Keys::default();
    found.rows.iter().for_each(|row| keys.add_request(request_at(row, 0)));
    Ok(keys)
}

/// The statements for these keys; those without keys are left out, the lock comes first.
fn read_asks(keys: &Keys) -> Vec<Ask> {
    let mut asks = Vec::new();
    if locks(keys) {
        let accounts: Vec<Uuid> = keys.accounts.difference(&keys.optional).map(|id| id.0).collect();
        let owners: Vec<Uuid> = keys.owners.iter().map(|id| id.0).collect();
        asks.push(Ask::new(ACCOUNTS).with(accounts).with(owners));
    }
    if !keys.optional.is_empty() {
        let optional: Vec<Uuid> = keys.optional.iter().map(|id| id.0).collect();
        asks.push(Ask::new(OPTIONAL_ACCOUNTS).with(optional));
    }
    if asks_for_requests(keys) {
        asks.push(of_requests(keys));
    }
    if !keys.digests.is_empty() {
        asks.push(Ask::new(DIGESTS).with(bytes(keys.digests.iter())));
    }
    if !keys.applications.is_empty() {
        let ids: Vec<Uuid> = keys.applications.iter().map(|id| id.0).collect();
        asks.push(Ask::new(APPLICATIONS).with(ids));
    }
    if !keys.grants.is_empty() {
        let (accounts, references): (Vec<Uuid>, Vec<String>) =
            keys.grants.iter().map(|(account, reference)| (account.0, reference.clone())).unzip();
        asks.push(Ask::new(GRANTS).with(accounts).with(references));
    }
    asks
}

fn of_requests(keys: &Keys) -> Ask {
    let credentials: Vec<Uuid> = keys.credentials.iter().map(|id| id.0).collect();
    let RequestColumns { accounts, requests, applications } = keys.requests.iter().collect();
    let owners: Vec<Uuid> = keys.inputs.iter().map(|(account, _)| account.0).collect();
    let inputs = bytes(keys.inputs.iter().map(|(_, fingerprint)| fingerprint));
    let ask = Ask::new(OF_REQUESTS).with(credentials).with(accounts).with(requests);
    ask.with(applications).with(owners).with(inputs)
}

/// Whether there are accounts that are waited for.
fn locks(keys: &Keys) -> bool {
    keys.accounts.len() > keys.optional.len() || !keys.owners.is_empty()
}

fn asks_for_requests(keys: &Keys) -> bool {
    !keys.credentials.is_empty() || !keys.requests.is_empty() || !keys.inputs.is_empty()
}

fn bytes<'a>(all: impl Iterator<Item = &'a [u8; 32]>) -> Vec<Vec<u8>> {
    all.map(|bytes| bytes.to_vec()).collect()
}

/// Takes the answers to `read_asks`, in its order.
fn take(keys: &Keys, answers: Vec<QueryAnswer>, rows: &mut BatchRows) {
    let mut answers = answers.into_iter().map(|answer| answer.rows);
    let mut next =
        |asked: bool| if asked { answers.next().unwrap_or_default() } else { Vec::new() };
    let waited = next(locks(keys));
    for row in waited.into_iter().chain(next(!keys.optional.is_empty())) {
        let id = AccountId(row.get(0));
        rows.rates.entry(id).or_insert(row.get::<_, i64>(2).unsigned_abs());
        rows.accounts.found(id, content(&row, 1, id.0.as_bytes()));
    }
    rows.accounts.absent(keys.accounts.difference(&keys.optional));
    rows.left_out.extend(keys.optional.iter().filter(|id| !rows.accounts.knows(id)));
    for row in next(asks_for_requests(keys)) {
        take_of_requests(&row, rows);
    }
    note_absent(keys, rows);
    for row in next(!keys.digests.is_empty()) {
        let id: Uuid = row.get(0);
        if let Some(digest) = fixed(&row, 2) {
            rows.digests.found(digest, content(&row, 1, id.as_bytes()));
        }
    }
    rows.digests.absent(&keys.digests);
    for row in next(!keys.applications.is_empty()) {
        let id = ApplicationId(row.get(0));
        rows.applications.found(id, content(&row, 1, id.0.as_bytes()));
    }
    rows.applications.absent(&keys.applications);
    for row in next(!keys.grants.is_empty()) {
        let (account, reference) = (AccountId(row.get(0)), row.get::<_, String>(1));
        let found = content(&row, 2, &grant_key(account, &reference));
        rows.adjustments.found((account, reference), found);
    }
    rows.adjustments.absent(&keys.grants);
}

/// Takes a row of the answer to `OF_REQUESTS`.
fn take_of_requests(row: &Row, rows: &mut BatchRows) {
    match row.get::<_, i16>(0) {
        0 => {
            let id = CredentialId(row.get(1));
            rows.credentials.found(id, content(row, 5, id.0.as_bytes()));
        }
        1 => {
            let key = request_at(row, 1);
            rows.requests.found(key, content(row, 5, &request_key(&key)));
        }
        2 => {
            let key = request_at(row, 1);
            rows.reservations.found(key, content(row, 5, &request_key(&key)));
        }
        _ => {
            let account = AccountId(row.get(1));
            if let Some(fingerprint) = fixed(row, 4) {
                let found = content(row, 5, &crash_key(account, &fingerprint));
                rows.crashes.found((account, fingerprint), found);
            }
        }
    }
}

/// What was asked for and not found in the answer to `OF_REQUESTS` is not there.
fn note_absent(keys: &Keys, rows: &mut BatchRows) {
    rows.credentials.absent(&keys.credentials);
    rows.requests.absent(&keys.requests);
    rows.reservations.absent(&keys.requests);
    rows.crashes.absent(&keys.inputs);
    let input = |key: &RequestKey| Some((key.account, rows.requests.sound(key)?.fingerprint));
    let inputs: BTreeSet<_> = keys.requests.iter().filter_map(input).collect();
    rows.crashes.absent(&inputs);
}

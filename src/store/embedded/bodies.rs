//! Stored answers. They are kept for replays until they expire.

use super::files::Files;
use super::tables::{self, due_key, get, put};
use crate::clock::UnixMillis;
use crate::failpoint::failpoint;
use crate::ledger::RequestKey;
use crate::ledger::state::{Reservation, StateResult};
use crate::store::backend::StoredBody;
use crate::store::queue::WriteAction;
use bytes::Bytes;
use redb::{Database, ReadableDatabase, WriteTransaction};

/// Makes the bodies among the actions durable, in one transaction of their own.
pub(super) fn write_all(database: &Database, actions: &[&WriteAction]) -> StateResult {
    let bodies: Vec<_> = actions.iter().filter_map(|action| action.body.as_ref()).collect();
    if bodies.is_empty() {
        return Ok(());
    }
    super::files::write(database, |txn| {
        bodies.iter().try_for_each(|(key, body)| insert(txn, key, body))
    })?;
    failpoint!("store::body_stored");
    Ok(())
}

fn insert(txn: &WriteTransaction, key: &RequestKey, body: &StoredBody) -> StateResult {
    let key = tables::request_key(key);
    put(&mut txn.open_table(tables::BODIES)?, &key, body)?;
    let due = due_key(body.expires_at, &key);
    put(&mut txn.open_table(tables::BODIES_DUE)?, &due, &())
}

/// Removes the answers of requests that hold a reservation: their settlement never came. It must
/// run while no request does.
pub(super) fn remove_orphans(files: &Files) -> StateResult {
    let reservations = tables::open(&files.ledger.begin_read()?, tables::RESERVATIONS)?;
    let stored = tables::open(&files.bodies.begin_read()?, tables::BODIES)?;
    let mut orphans = Vec::new();
    for row in tables::under::<Reservation>(&reservations, b"")? {
        let (key, _) = row?;
        if stored.get(key.as_slice())?.is_some() {
            orphans.push(key);
        }
    }
    if orphans.is_empty() {
        return Ok(());
    }
    super::files::write(&files.bodies, |txn| {
        let mut bodies = txn.open_table(tables::BODIES)?;
        orphans.iter().try_for_each(|key| Ok(bodies.remove(key.as_slice()).map(drop)?))
    })
}

/// The body stored for a request, unless it has expired.
pub(super) fn read(files: &Files, key: &RequestKey, now: UnixMillis) -> StateResult<Option<Bytes>> {
    let txn = files.bodies.begin_read()?;
    let bodies = tables::open(&txn, tables::BODIES)?;
    let body: Option<StoredBody> = get(&bodies, &tables::request_key(key))?;
    let fresh = body.filter(|body| now < body.expires_at);
    Ok(fresh.map(|body| body.content))
}

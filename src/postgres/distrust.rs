//! What one node found broken in the ledger, so that no node admits anything any more. It stays
//! until a start has audited everything and found nothing.

use super::failure::Failure;
use super::session::{Ask, DatabaseSession, QueryAnswer};
use cresset_store::codec::encode;

const KEY: &str = "distrust";
const READ: &str = "select row from meta where key = $1";
const TELL: &str = "insert into meta (key, row) values ($1, $2) on conflict (key) do nothing";
const CLEAR: &str = "delete from meta where key = $1";

pub(super) fn ask() -> Ask {
    Ask::new(READ).with(KEY)
}

/// Why the ledger is not trusted; `None` where it is. A damaged row is a reason, too.
pub(super) fn read(answer: &QueryAnswer) -> Option<String> {
    let row = answer.rows.first()?;
    let told = super::rows::content(row, 0, KEY.as_bytes());
    Some(told.unwrap_or_else(|_| "another node says so, in a row that is damaged".into()))
}

pub(super) async fn tell(session: &DatabaseSession, why: &str) -> Result<(), Failure> {
    let row = encode(KEY.as_bytes(), &why.to_owned());
    session.ask(Ask::new(TELL).with(KEY).with(row)).await.map(drop)
}

pub(super) async fn clear(session: &DatabaseSession) -> Result<(), Failure> {
    session.ask(Ask::new(CLEAR).with(KEY)).await.map(drop)
}

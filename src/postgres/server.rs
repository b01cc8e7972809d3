//! What a server must be for a ledger to be kept there.

use super::failure::{Failure, POOLED};
use super::session::{Ask, DatabaseSession};
use cresset_store::{StoreError, StoreResult};

/// PostgreSQL 15, as `server_version_num` has it.
const OLDEST: i32 = 150_000;

const SETTINGS: &str = "select current_setting('server_version_num')::integer, \
    current_setting('server_version'), current_setting('fsync'), \
    current_setting('full_page_writes'), pg_is_in_recovery(), \
    current_setting('synchronous_standby_names')";

/// Fails unless the server is new enough, keeps what it acknowledges, and waits for this many
/// standbys.
pub(super) async fn check(session: &DatabaseSession, standbys: u32) -> StoreResult {
    let answer = session.ask(Ask::new(SETTINGS)).await?;
    let row = answer.rows.first().ok_or_else(|| Failure::lost("it says nothing of itself"))?;
    let (number, version): (i32, String) = (row.get(0), row.get(1));
    let refuse =
        |what: String| Err(StoreError::Unusable(format!("the database in ledger.url {what}")));
    if number < OLDEST {
        return refuse(format!("is PostgreSQL {version}, and 15 is the oldest that serves"));
    }
    for (column, name) in [(2, "fsync"), (3, "full_page_writes")] {
        if row.get::<_, String>(column) != "on" {
            return refuse(format!("has {name} off, and loses what it acknowledged: set it on"));
        }
    }
    if row.get(4) {
        return refuse("is a standby, which takes no writes: name the primary".into());
    }
    let waits = waits_for(row.get(5));
    if waits >= standbys {
        return Ok(());
    }
    refuse(format!(
        "lets a commit wait for {waits} standbys, and ledger.standbys is {standbys}: set \
         synchronous_standby_names, or ledger.standbys to what a failover may lose"
    ))
}

/// Fails where a proxy in between gives each transaction to any session of the database: what a
/// session sets and prepares would be lost.
pub(super) async fn check_session(
    session: &DatabaseSession,
    other: &DatabaseSession,
) -> StoreResult {
    let before = process_of(session).await?;
    // Such a proxy gives the session that was used last to the next transaction.
    other.script("begin").await?;
    let same = before == process_of(session).await?;
    if same { Ok(()) } else { Err(StoreError::Unusable(POOLED.into())) }
}

/// The server's process behind a session.
async fn process_of(session: &DatabaseSession) -> Result<Option<i32>, Failure> {
    let answer = session.ask(Ask::new("select pg_backend_pid()")).await?;
    Ok(answer.rows.first().map(|row| row.get(0)))
}

/// The standbys that a commit waits for, by `synchronous_standby_names`: `FIRST n (…)`,
/// `ANY n (…)`, `n (…)`, or a list of names, of which it waits for one.
fn waits_for(names: &str) -> u32 {
    let before_list = names.split_once('(').map(|(before, _)| before);
    match before_list.and_then(|before| before.split_whitespace().last()) {
        Some(number) => number.parse().unwrap_or(1),
        None => u32::from(!names.trim().is_empty()),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn standbys_are_counted_as_the_server_counts_them() {
        for (names, expect) in [
            ("", 0),
            ("  ", 0),
            ("*", 1),
            ("one", 1),
            ("one, two", 1),
            ("FIRST 2 (one, two, three)", 2),
            ("ANY 3 (*)", 3),
            ("2 (one, two)", 2),
            ("first 1(one)", 1),
        ] {
            assert_eq!(super::waits_for(names), expect, "{names:?}");
        }
    }
}

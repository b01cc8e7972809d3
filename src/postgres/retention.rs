//! Retention: expired answers, requests past their time and old crashes are deleted, in passes of a
//! bounded number of rows. The journal stays. Ended requests stay where they are until they are
//! forgotten; past their replay time they are known and nothing more.

use super::failure::Failure;
use super::session::{Ask, DatabaseSession};
use super::snapshot::signed;
use cresset_base::{AccountId, RequestId, UnixMillis};
use cresset_store::Limits;

/// Rows of one kind deleted in one statement, which bounds how long their accounts are held.
const MAX_ROWS: i64 = 1_000;

/// Deletes answers, the oldest first, and takes their bytes from their accounts' sums. The accounts
/// are locked first and in the order in which batches lock them.
const EXPIRED: &str = "with due as materialized (select account, request, application from bodies \
        where expires_at <= $1 order by expires_at limit $2), \
    held as materialized (select id from accounts where id in (select account from due) \
        order by id for update), \
    gone as (delete from bodies b using due d, held h where h.id = b.account \
        and b.account = d.account and b.request = d.request and b.application = d.application \
        and b.expires_at <= $1 returning b.account, b.size) \
    update accounts a set answer_bytes = a.answer_bytes - g.bytes \
    from (select account, sum(size)::bigint as bytes, count(*) as answers from gone \
        group by account) as g where a.id = g.account returning g.answers";
const ERASE: &str = "with due as materialized (select account, request, application from bodies \
        where account = $1 and ($2 or request = $3) limit $4), \
    held as materialized (select id from accounts where id = $1 for update), \
    gone as (delete from bodies b using due d, held h where h.id = b.account \
        and b.account = d.account and b.request = d.request and b.application = d.application \
        returning b.account, b.size) \
    update accounts a set answer_bytes = a.answer_bytes - g.bytes \
    from (select account, sum(size)::bigint as bytes, count(*) as answers from gone \
        group by account) as g where a.id = g.account returning g.answers";
const FORGOTTEN: &str = "delete from requests where (account, request, application) in \
    (select account, request, application from requests where ended_at <= $1 \
    order by ended_at limit $2 for update skip locked)";
const OLD_CRASHES: &str = "delete from crashes where (account, fingerprint) in \
    (select account, fingerprint from crashes where at <= $1 limit $2 for update skip locked)";

/// One pass; true when more is due.
pub(super) async fn sweep(
    session: &DatabaseSession,
    now: UnixMillis,
    limits: &Limits,
) -> Result<bool, Failure> {
    let ago = |span: u64| signed(now.0.saturating_sub(span));
    let due = Ask::new(EXPIRED).with(signed(now.0)).with(MAX_ROWS);
    let mut most = answers(session, due).await?;
    let (tombstone_ms, crash_block_ms) =
        (limits.requests.tombstone_ms(), limits.requests.crash_block_ms());
    if now.0 >= tombstone_ms {
        let due = Ask::new(FORGOTTEN).with(ago(tombstone_ms)).with(MAX_ROWS);
        most = most.max(session.ask(due).await?.affected);
    }
    if now.0 >= crash_block_ms {
        let due = Ask::new(OLD_CRASHES).with(ago(crash_block_ms)).with(MAX_ROWS);
        most = most.max(session.ask(due).await?.affected);
    }
    Ok(most >= MAX_ROWS as u64)
}

/// Erases some of an account's answers, or of its requests with one id, and returns how many.
pub(super) async fn erase(
    session: &DatabaseSession,
    account: AccountId,
    request: Option<RequestId>,
) -> Result<u64, Failure> {
    let id = request.map(|request| request.0).unwrap_or_default();
    let due = Ask::new(ERASE).with(account.0).with(request.is_none()).with(id).with(MAX_ROWS);
    answers(session, due).await
}

async fn answers(session: &DatabaseSession, ask: Ask) -> Result<u64, Failure> {
    let gone = session.ask(ask).await?;
    Ok(gone.rows.iter().map(|row| row.get::<_, i64>(0).unsigned_abs()).sum())
}

//! The tables. Each row has its content as one value with a checksum, as the embedded ledger stores
//! it; what stands beside it is for the database's own rules, its indexes, and people who read it.
//!
//! The rules that the database itself keeps are the last line of defence. A bucket is never
//! overdrawn. A journal has one entry of each number. An attempt is reserved once and ended once.

use super::session::{Ask, DatabaseSession, QueryAnswer};
use cresset_store::codec::{decode, encode};
use cresset_store::{StoreError, StoreResult};

/// The schema of these tables: 1 plus the steps that lead to it.
const SCHEMA: u32 = 1 + STEPS.len() as u32;

/// The key of the schema in `meta`.
const FORMAT: &str = "format";
/// The schema, and what tables have in its place that were made before schemas began at 1.
const FOUND: &str =
    "select key, row from meta where key in ('format', 'identity') order by key desc limit 1";

const TABLES: &str = "
create table meta (key text primary key, row bytea not null);
create table nodes (
    boot uuid primary key,
    state smallint not null,
    lease_until timestamptz not null,
    confirmed bigint not null default 0,
    about text not null default ''
);
create table accounts (
    id uuid primary key,
    in_flight integer not null check (in_flight >= 0),
    trial_credited bigint not null,
    trial_debited bigint not null check (trial_debited >= 0),
    trial_reserved bigint not null check (trial_reserved >= 0),
    premium_credited bigint not null,
    premium_debited bigint not null check (premium_debited >= 0),
    premium_reserved bigint not null check (premium_reserved >= 0),
    sequence bigint not null,
    clock bigint not null,
    answer_bytes bigint not null default 0 check (answer_bytes >= 0),
    rate_due bigint not null default 0,
    row bytea not null,
    check (trial_credited >= trial_debited + trial_reserved),
    check (premium_credited >= premium_debited + premium_reserved)
) with (fillfactor = 40);
create table applications (id uuid primary key, account uuid not null, row bytea not null);
create table credentials (
    id uuid primary key,
    account uuid not null,
    digest bytea not null unique,
    row bytea not null
) with (fillfactor = 60);
create table grants (
    account uuid,
    reference text,
    row bytea not null,
    primary key (account, reference)
);
create table requests (
    account uuid,
    request uuid,
    application uuid,
    fingerprint bytea not null,
    credential uuid not null,
    boot uuid not null,
    state smallint not null,
    ended_at bigint,
    row bytea not null,
    primary key (account, request, application)
) with (fillfactor = 70);
create index requests_ended on requests (ended_at) where ended_at is not null;
create table reservations (
    account uuid,
    request uuid,
    application uuid,
    attempt uuid not null,
    boot uuid not null,
    row bytea not null,
    primary key (account, request, application)
);
create index reservations_boot on reservations (boot);
create table entries (
    account uuid,
    sequence bigint,
    kind smallint not null,
    attempt uuid,
    at bigint not null,
    row bytea not null,
    primary key (account, sequence)
);
create unique index one_reserve on entries (attempt) where kind = 1;
create unique index one_end on entries (attempt) where kind in (2, 3);
create table crashes (
    account uuid,
    fingerprint bytea,
    at bigint not null,
    row bytea not null,
    primary key (account, fingerprint)
);
create table bodies (
    account uuid,
    request uuid,
    application uuid,
    expires_at bigint not null,
    size bigint not null,
    row bytea not null,
    primary key (account, request, application)
);
alter table bodies alter column row set storage external;
create index bodies_due on bodies (expires_at);
";

/// The steps in order: the first one makes schema 2 of schema 1. A released step never changes.
const STEPS: &[&str] = &[REMEMBER_PERIODS];
/// Accounts and credentials remember the uses of several periods. Their rows are read as they are,
/// and this number keeps builds away that cannot read the new ones.
const REMEMBER_PERIODS: &str = "";
/// Nodes of an earlier build write tables as they knew them.
const RUNNING: &str =
    "select 1 from nodes where state = 0 and lease_until > clock_timestamp() limit 1";

/// The names of all tables.
const NAMES: &str = "select table_name::text from information_schema.tables \
    where table_schema = current_schema() and table_name in ('meta', 'nodes', 'accounts', \
    'applications', 'credentials', 'grants', 'requests', 'reservations', 'entries', 'crashes', \
    'bodies') order by table_name limit 1";

/// Makes the tables of an empty ledger; refuses where there is a table of such a name.
pub(super) async fn create(session: &DatabaseSession) -> StoreResult {
    begin_with_tables(session).await?;
    Ok(session.script("commit").await?)
}

/// Begins a transaction and makes the tables in it; refuses as `create` does.
pub(super) async fn begin_with_tables(session: &DatabaseSession) -> StoreResult {
    if let Some(row) = session.ask(Ask::new(NAMES)).await?.rows.first() {
        let table: String = row.get(0);
        return Err(StoreError::Unusable(format!(
            "the database has a table {table} already; it is left as it is: name an empty database"
        )));
    }
    // All or nothing: what fails ends the session, and with it the transaction.
    session.script("begin").await?;
    session.script(TABLES).await?;
    let row = encode(FORMAT.as_bytes(), &SCHEMA);
    session.ask(Ask::new("insert into meta values ($1, $2)").with(FORMAT).with(row)).await?;
    Ok(())
}

/// Whether there is a table of such a name.
pub(super) async fn has_tables(session: &DatabaseSession) -> StoreResult<bool> {
    Ok(!session.ask(Ask::new(NAMES)).await?.rows.is_empty())
}

/// Brings the tables up to the schema of this build; fails where they have another one.
pub(super) async fn check(session: &DatabaseSession) -> StoreResult {
    bring_up(session, STEPS).await
}

/// Brings the tables up to the schema after the last of `steps`.
pub(super) async fn bring_up(session: &DatabaseSession, steps: &[&str]) -> StoreResult {
    let missing = || {
        StoreError::Unusable(
            "the database has no ledger: name another database, or make one with `cresset init --ledger`".into(),
        )
    };
    if !has_tables(session).await? {
        return Err(missing());
    }
    let QueryAnswer { rows, .. } = session.ask(Ask::new(FOUND)).await.map_err(|failure| {
        StoreError::Unusable(format!("the tables are not those of a ledger: {failure}"))
    })?;
    let found = rows.first().ok_or_else(missing)?;
    if found.get::<_, &str>(0) != FORMAT {
        return Err(StoreError::older_format("the ledger in the database"));
    }
    let stored: &[u8] = found.get(1);
    let schema: u32 = decode(FORMAT.as_bytes(), stored)?;
    match steps_after(schema, steps)? {
        [] => Ok(()),
        due => extend(session, stored.to_vec(), 1 + steps.len() as u32, due).await,
    }
}

/// The steps from this schema on.
fn steps_after<'s>(schema: u32, steps: &'s [&'s str]) -> StoreResult<&'s [&'s str]> {
    let due = (schema as usize).checked_sub(1).and_then(|taken| steps.get(taken..));
    due.ok_or_else(|| {
        let known = 1 + steps.len();
        StoreError::Unusable(format!(
            "the ledger in the database has schema {schema} and this build knows {known}: use the build that made it"
        ))
    })
}

/// Takes the steps that are `due` and stores the `schema` that they lead to, all or nothing.
async fn extend(
    session: &DatabaseSession,
    stored: Vec<u8>,
    schema: u32,
    due: &[&str],
) -> StoreResult {
    if !session.ask(Ask::new(RUNNING)).await?.rows.is_empty() {
        return Err(StoreError::Unusable(
            "nodes of an earlier build use the ledger in the database: stop them first".into(),
        ));
    }
    session.script("begin").await?;
    let update = Ask::new("update meta set row = $2 where key = $1 and row = $3");
    let row = encode(FORMAT.as_bytes(), &schema);
    if session.ask(update.with(FORMAT).with(row).with(stored)).await?.affected == 0 {
        // Another process was faster.
        return Ok(session.script("rollback").await?);
    }
    for step in due {
        session.script(step).await?;
    }
    session.script("commit").await?;
    tracing::info!(schema, "the tables of the ledger have the form of this build");
    Ok(())
}

//! The end of an attempt: it is settled with a charge or released without one, once. The first
//! committed end counts.

use super::amounts::{BucketAmounts, Usage};
use super::budgets::{self, BudgetAlert, BudgetOwner, CalendarUse, Consumption};
use super::commands::{Outcome, Refusal, ReleaseCause, SettleEnd};
use super::error::ApplyResult;
use super::records::{
    Account, Attempt, AttemptState, Credential, EntryKind, FailureCode, RequestKey, RequestRecord,
};
use super::state::{Crashes, LedgerState, Reservation};
use super::{invariants, journal};
use cresset_base::{AccountId, AttemptId, BootId, UnixMillis};
use uuid::Uuid;

pub(super) fn start(
    state: &mut impl LedgerState,
    key: &RequestKey,
    attempt: AttemptId,
    now: UnixMillis,
) -> ApplyResult {
    let mut record = match find(state, key, attempt)? {
        Found::Live(record) => record,
        Found::Ended(record) => return Ok(Outcome::AlreadyResolved(record)),
    };
    if record.latest().state == AttemptState::Queued {
        let latest = record.latest_mut();
        latest.state = AttemptState::Running;
        latest.started_at = Some(now);
        state.put_request(&record)?;
    }
    Ok(Outcome::Request(record))
}

pub(super) fn settle(
    state: &mut impl LedgerState,
    key: &RequestKey,
    attempt: AttemptId,
    usage: Usage,
    end: SettleEnd,
    now: UnixMillis,
) -> ApplyResult {
    let mut record = match find(state, key, attempt)? {
        Found::Live(record) => record,
        Found::Ended(record) => return Ok(Outcome::AlreadyResolved(record)),
    };
    let latest = record.latest_mut();
    // The start may not have been recorded yet, but an attempt that used tokens has run.
    latest.started_at = latest.started_at.or(Some(now));
    latest.charged = invariants::charge(latest, &usage, key)?;
    latest.usage = Some(usage);
    (latest.state, latest.finish_reason) = match end {
        SettleEnd::Completed(reason) => (AttemptState::Completed, Some(reason)),
        SettleEnd::Cancelled => (AttemptState::Cancelled, None),
        SettleEnd::FormatTooCostly => (AttemptState::Failed, None),
    };
    if end == SettleEnd::FormatTooCostly {
        latest.failure = Some(FailureCode::FormatTooCostly);
    }
    let fingerprint = record.fingerprint;
    let entry = |key, attempt| EntryKind::Settle { key, attempt };
    let (record, alerts) = finish(state, record, true, now, entry)?;
    // An input that completes does not crash the node.
    let completed = matches!(end, SettleEnd::Completed(_));
    if completed && state.crashes(key.account, &fingerprint)?.is_some() {
        state.remove_crashes(key.account, &fingerprint)?;
    }
    Ok(Outcome::Settled { record, alerts })
}

pub(super) fn release(
    state: &mut impl LedgerState,
    key: &RequestKey,
    attempt: AttemptId,
    cause: ReleaseCause,
    now: UnixMillis,
) -> ApplyResult {
    let mut record = match find(state, key, attempt)? {
        Found::Live(record) => record,
        Found::Ended(record) => return Ok(Outcome::AlreadyResolved(record)),
    };
    let latest = record.latest_mut();
    let started = latest.started_at.is_some();
    match cause {
        ReleaseCause::Failed(code) | ReleaseCause::TurnedAway(code) => {
            latest.state = AttemptState::Failed;
            latest.failure = Some(code);
        }
        ReleaseCause::CancelledInQueue => latest.state = AttemptState::Cancelled,
    }
    let turned_away = matches!(cause, ReleaseCause::TurnedAway(_)) && !started;
    let keeps_row = !turned_away || record.attempts.len() > 1;
    let entry = |key, attempt| EntryKind::Release { key, attempt };
    finish(state, record, keeps_row, now, entry).map(|(record, _)| Outcome::Request(record))
}

/// Ends the attempts that earlier boots left open. An input that was running is remembered, so that
/// an input which crashes the node is not run for ever.
pub(super) fn recover(
    state: &mut impl LedgerState,
    boot: BootId,
    limit: usize,
    crash_block_ms: u64,
    now: UnixMillis,
) -> ApplyResult {
    let mut open = state.foreign_reservations(boot, limit.saturating_add(1))?;
    let remaining = open.len() > limit;
    open.truncate(limit);
    for reservation in &open {
        abandon(state, reservation, crash_block_ms, now)?;
    }
    Ok(Outcome::Recovered { released: open.len(), remaining })
}

fn abandon(
    state: &mut impl LedgerState,
    reservation: &Reservation,
    crash_block_ms: u64,
    now: UnixMillis,
) -> ApplyResult<()> {
    let key = &reservation.key;
    let record = state.request(key)?;
    let record = record.ok_or_else(|| invariants::broken("a reservation has no request", key))?;
    let was_running = record.latest().state == AttemptState::Running;
    let cause = ReleaseCause::Failed(FailureCode::NodeRestarted);
    let outcome = release(state, key, reservation.attempt, cause, now)?;
    if matches!(outcome, Outcome::AlreadyResolved(_)) {
        return Err(invariants::broken("a reservation outlived its attempt", key).into());
    }
    if was_running {
        let (account, boot) = (key.account, reservation.boot);
        let known = state.crashes(account, &record.fingerprint)?;
        let known = known.filter(|crashes| crashes.count_at(now, crash_block_ms));
        if let Some(crashes) = after_crash(known, boot, now) {
            state.put_crashes(account, &record.fingerprint, crashes)?;
        }
    }
    Ok(())
}

/// The count after a crash of `boot`; `None` when that crash is counted already. It counts once per
/// boot: an input that ran in many requests at once crashed the node only once.
fn after_crash(known: Option<Crashes>, boot: BootId, at: UnixMillis) -> Option<Crashes> {
    let before = match known {
        Some(crashes) if crashes.boot == boot => return None,
        Some(crashes) => crashes.count,
        None => 0,
    };
    Some(Crashes { count: before.saturating_add(1), boot, at })
}

pub(super) fn take_back_crash(
    state: &mut impl LedgerState,
    account: AccountId,
    fingerprint: &[u8; 32],
    boot: BootId,
) -> ApplyResult {
    let known = state.crashes(account, fingerprint)?.filter(|crashes| crashes.boot == boot);
    match known {
        None => return Ok(Outcome::Repeated),
        Some(Crashes { count: 0 | 1, .. }) => state.remove_crashes(account, fingerprint)?,
        Some(crashes) => {
            // Without a boot, so that the command may be sent again.
            let crashes =
                Crashes { count: crashes.count - 1, boot: BootId(Uuid::nil()), ..crashes };
            state.put_crashes(account, fingerprint, crashes)?;
        }
    }
    Ok(Outcome::Done)
}

pub(super) fn forget_crashes(
    state: &mut impl LedgerState,
    account: AccountId,
    fingerprint: &[u8; 32],
) -> ApplyResult {
    if state.crashes(account, fingerprint)?.is_none() {
        return Ok(Outcome::Repeated);
    }
    state.remove_crashes(account, fingerprint)?;
    Ok(Outcome::Done)
}

enum Found {
    Live(RequestRecord),
    Ended(RequestRecord),
}

/// Finds the request among the live, recent and archived ones.
pub(super) fn known(state: &impl LedgerState, key: &RequestKey) -> ApplyResult<RequestRecord> {
    match state.request(key)? {
        Some(record) => Ok(record),
        None => Ok(state.archived(key)?.ok_or(Refusal::RequestNotFound)?),
    }
}

fn find(state: &impl LedgerState, key: &RequestKey, attempt: AttemptId) -> ApplyResult<Found> {
    let record = known(state, key)?;
    let found = record.attempt(attempt).ok_or(Refusal::RequestNotFound)?;
    Ok(if found.state.is_terminal() { Found::Ended(record) } else { Found::Live(record) })
}

/// Account and credential of an attempt that ends, and the budgets that operators are told of.
fn count_out(
    state: &impl LedgerState,
    attempt: &Attempt,
    reservation: &Reservation,
) -> ApplyResult<(Account, Credential, Vec<BudgetAlert>)> {
    let key = &reservation.key;
    let broken = |rule| invariants::broken(rule, key);
    let account = state.account(key.account)?.ok_or_else(|| broken("a request has no account"))?;
    let in_flight =
        account.in_flight.checked_sub(1).ok_or_else(|| broken("more ends than reservations"))?;
    let credential = state
        .credential(attempt.credential)?
        .ok_or_else(|| broken("an attempt has no credential"))?;
    let reserved = Consumption { units: attempt.reserved.total(), tokens: reservation.tokens };
    let spent = attempt.consumption();
    let settle = |used: &CalendarUse| {
        let after = used.settle(attempt.created_at, reserved, spent);
        after.ok_or_else(|| broken("an end frees more than its period reserves"))
    };
    let (of_account, of_key) = (settle(&account.used)?, settle(&credential.used)?);
    let alerts = alerts(&account, &of_account, &credential, &of_key);
    let account = Account { in_flight, used: of_account, ..account };
    Ok((account, Credential { used: of_key, ..credential }, alerts))
}

/// The budgets that operators are told of where the uses become these.
fn alerts(
    account: &Account,
    of_account: &CalendarUse,
    credential: &Credential,
    of_key: &CalendarUse,
) -> Vec<BudgetAlert> {
    let owner = BudgetOwner::Account(account.id);
    let accounts = budgets::alerts(owner, &account.budgets, &account.used, of_account);
    let owner = BudgetOwner::Key(credential.id);
    let keys = budgets::alerts(owner, &credential.budgets, &credential.used, of_key);
    accounts.chain(keys).collect()
}

/// Frees the whole reservation, debits the latest attempt's charge, and stores the attempt's end.
/// Without `keeps_row` the request is forgotten; its entries stay in the journal.
fn finish(
    state: &mut impl LedgerState,
    mut record: RequestRecord,
    keeps_row: bool,
    now: UnixMillis,
    kind: fn(RequestKey, AttemptId) -> EntryKind,
) -> ApplyResult<(RequestRecord, Vec<BudgetAlert>)> {
    let key = record.key;
    record.latest_mut().finished_at = Some(now);
    let Attempt { id, reserved, charged, .. } = *record.latest();
    let reservation = state.reservation(&key)?;
    let reservation = invariants::check_reservation(reservation, record.latest(), &key)?;
    let (account, credential, alerts) = count_out(state, record.latest(), &reservation)?;
    let after = state
        .balances(key.account)?
        .resolve(reserved, charged)
        .ok_or_else(|| invariants::broken("an end frees more than is reserved", &key))?;
    invariants::check_balances(key.account, &after)?;
    let entry = kind(key, id);
    let amount = match entry {
        EntryKind::Release { .. } => reserved,
        _ => charged,
    };
    if record.latest().failed_on_the_node() && charged != BucketAmounts::ZERO {
        return Err(invariants::broken("a failed attempt is charged", &key).into());
    }
    state.put_account(&account)?;
    state.put_credential(&credential)?;
    if keeps_row {
        state.put_request(&record)?;
    } else {
        state.remove_request(&key)?;
    }
    state.remove_reservation(&key)?;
    journal::post(state, now, key.account, entry, amount, after)?;
    Ok((record, alerts))
}

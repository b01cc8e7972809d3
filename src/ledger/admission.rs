//! Admits a request: checks credential, earlier attempts, concurrency and balance, and makes the
//! reservation, in one step. How a known id is answered is one rule, for admission and for reads.

pub use super::admission_rate::AdmissionRate;
use super::amounts::{BucketAmounts, Microcredits};
use super::budgets::Consumption;
use super::commands::{Admit, Outcome, Refusal};
use super::error::ApplyResult;
use super::records::{
    Account, Attempt, AttemptState, Balances, Credential, EntryKind, RequestRecord,
};
use super::state::{LedgerState, Reservation};
use super::{budget_rules, invariants, journal};
use cresset_base::UnixMillis;

pub(super) fn admit(state: &mut impl LedgerState, admit: &Admit, now: UnixMillis) -> ApplyResult {
    let (account, credential) = authorize(state, admit, now)?;
    let known = state.request(&admit.key)?;
    if let Some(record) = &known {
        if let Some(outcome) = repeat(record, admit, now)? {
            return Ok(outcome);
        }
    } else if let Some(record) = state.archived(&admit.key)? {
        // An archived record is past every retention.
        judge(&record, &admit.fingerprint, now, 0)?;
        return Err(Refusal::ResultExpired.into());
    }
    let crashes = state.crashes(account.id, &admit.fingerprint)?;
    if crashes.is_some_and(|crashes| crashes.are_too_many(now, admit.crash_block_ms)) {
        return Err(Refusal::AttemptsExhausted.into());
    }
    let rate_due = check_use(state, admit, &account, now)?;
    let balances = state.balances(account.id)?;
    let needed = upper_bound(admit, &balances)?;
    budget_rules::check(admit, &account, &credential, needed, now)?;
    let amount = cover(needed.units, &balances)?;
    let record = with_attempt(known, admit, amount, now);
    let owners = count_in(account, credential, needed, now).ok_or(Refusal::AmountOverflow)?;
    let admitted = reserve(state, record, &owners, &balances, needed.tokens, now)?;
    state.put_rate_due(admit.key.account, rate_due)?;
    Ok(admitted)
}

/// Checks how many requests of the account are in flight, and how often it was admitted. Returns
/// when its rate has recovered after this admission, where the ledger counts that.
fn check_use(
    state: &impl LedgerState,
    admit: &Admit,
    account: &Account,
    now: UnixMillis,
) -> ApplyResult<Option<u64>> {
    if account.in_flight >= admit.max_concurrent {
        return Err(Refusal::ConcurrencyLimit { limit: admit.max_concurrent }.into());
    }
    Ok(state.rate_due(account.id)?.map(|due| admit.rate.admit(due, now)).transpose()?)
}

/// Both with one more request in flight, which may take `needed`. `None` when that overflows.
fn count_in(
    account: Account,
    credential: Credential,
    needed: Consumption,
    now: UnixMillis,
) -> Option<(Account, Credential)> {
    let used = account.used.reserve(needed, now)?;
    let account = Account { in_flight: account.in_flight + 1, used, ..account };
    let used = credential.used.reserve(needed, now)?;
    Some((account, Credential { used, ..credential }))
}

/// Account and credential, if the credential is still valid for the scope of the request.
fn authorize(
    state: &impl LedgerState,
    admit: &Admit,
    now: UnixMillis,
) -> ApplyResult<(Account, Credential)> {
    let credential = state
        .credential(admit.credential)?
        .filter(|credential| credential.account == admit.key.account)
        .filter(|credential| credential.application == admit.key.application)
        .ok_or(Refusal::CredentialInvalid)?;
    let account = state
        .account(credential.account)?
        .filter(|account| credential.authorizes(account, now))
        .ok_or(Refusal::CredentialInvalid)?;
    Ok((account, credential))
}

/// The state of a request whose id and input were seen before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Queued or running.
    InProgress,
    Completed,
    Cancelled,
    /// It failed on the node's side, and another attempt is allowed.
    MayRetry,
}

/// Judges a record at `now`, for an input with this fingerprint. A request is answered for
/// `retention_ms` after its end; later it is known but expired, however it ended.
pub fn judge(
    record: &RequestRecord,
    fingerprint: &[u8; 32],
    now: UnixMillis,
    retention_ms: u64,
) -> Result<Seen, Refusal> {
    if record.fingerprint != *fingerprint {
        return Err(Refusal::FingerprintMismatch);
    }
    let latest = record.latest();
    let expires_at = latest.finished_at.map(|at| at.0.saturating_add(retention_ms));
    if expires_at.is_some_and(|at| at <= now.0) {
        return Err(Refusal::ResultExpired);
    }
    match latest.state {
        AttemptState::Queued | AttemptState::Running => Ok(Seen::InProgress),
        AttemptState::Completed => Ok(Seen::Completed),
        AttemptState::Cancelled => Ok(Seen::Cancelled),
        AttemptState::Failed if !latest.failed_on_the_node() => Err(Refusal::FormatTooCostly),
        AttemptState::Failed if record.is_exhausted() => Err(Refusal::AttemptsExhausted),
        AttemptState::Failed => Ok(Seen::MayRetry),
    }
}

/// The outcome for an id that has been seen before; `None` when another attempt may be made.
fn repeat(record: &RequestRecord, admit: &Admit, now: UnixMillis) -> ApplyResult<Option<Outcome>> {
    let seen = judge(record, &admit.fingerprint, now, admit.retention_ms)?;
    // A command is sent again after a commit whose result was not known.
    let resent = record.attempt(admit.attempt).is_some();
    match seen {
        Seen::InProgress if record.latest().id == admit.attempt => {
            Ok(Some(Outcome::Admitted(record.clone())))
        }
        Seen::InProgress | Seen::Completed | Seen::Cancelled => {
            Ok(Some(Outcome::Existing(record.clone())))
        }
        Seen::MayRetry if resent => Err(Refusal::AttemptsExhausted.into()),
        Seen::MayRetry => Ok(None),
    }
}

/// The most that the request may take.
fn upper_bound(admit: &Admit, balances: &Balances) -> ApplyResult<Consumption> {
    let Admit { prompt_tokens, max_output_tokens, .. } = *admit;
    let (needed, available) = (Microcredits::MAX, balances.available().total());
    let units = admit
        .prices
        .upper_bound(prompt_tokens, max_output_tokens)
        .ok_or(Refusal::InsufficientCredits { needed, available })?;
    Ok(Consumption { units, tokens: u64::from(prompt_tokens) + u64::from(max_output_tokens) })
}

/// The upper bound of the cost, split over what is available.
fn cover(needed: Microcredits, balances: &Balances) -> ApplyResult<BucketAmounts> {
    if let Some(amounts) = BucketAmounts::take(needed, balances.available()) {
        return Ok(amounts);
    }
    let available = balances.available().total();
    let once_settled = BucketAmounts::take(needed, balances.unspent()).is_some();
    Err(if once_settled {
        Refusal::CreditsReserved { needed, available }
    } else {
        Refusal::InsufficientCredits { needed, available }
    }
    .into())
}

fn reserve(
    state: &mut impl LedgerState,
    record: RequestRecord,
    (account, credential): &(Account, Credential),
    before: &Balances,
    tokens: u64,
    now: UnixMillis,
) -> ApplyResult {
    let key = record.key;
    let Attempt { id: attempt, boot, reserved: amount, .. } = *record.latest();
    let after = before
        .reserve(amount)
        .ok_or_else(|| invariants::broken("a reservation passes its bucket", &key))?;
    invariants::check_balances(account.id, &after)?;
    invariants::check_unreserved(state, &key)?;
    state.put_account(account)?;
    state.put_credential(credential)?;
    state.put_request(&record)?;
    state.put_reservation(&Reservation { key, attempt, boot, amount, tokens })?;
    let kind = EntryKind::Reserve { key, attempt };
    journal::post(state, now, account.id, kind, amount, after)?;
    Ok(Outcome::Admitted(record))
}

fn with_attempt(
    known: Option<RequestRecord>,
    admit: &Admit,
    reserved: BucketAmounts,
    now: UnixMillis,
) -> RequestRecord {
    let mut record = known.unwrap_or_else(|| RequestRecord {
        key: admit.key,
        fingerprint: admit.fingerprint,
        session: admit.session,
        model: admit.model,
        stream: admit.stream,
        attempts: Vec::new(),
    });
    let attempt = Attempt {
        id: admit.attempt,
        number: record.attempts.len() as u32 + 1,
        retry_of: record.attempts.last().map(|before| before.id),
        credential: admit.credential,
        boot: admit.boot,
        state: AttemptState::Queued,
        failure: None,
        finish_reason: None,
        cancel_requested: false,
        prices: admit.prices,
        reserved,
        charged: BucketAmounts::ZERO,
        usage: None,
        created_at: now,
        started_at: None,
        finished_at: None,
    };
    record.attempts.push(attempt);
    record
}

impl AdmissionRate {
    /// When the rate has recovered after one more admission at `now`, which had recovered, or will
    /// have, at `due`; both are microseconds since 1970.
    fn admit(self, due: u64, now: UnixMillis) -> Result<u64, Refusal> {
        let now = now.0.saturating_mul(1_000);
        let interval = 60_000_000 / u64::from(self.per_minute.max(1));
        let tolerance = interval.saturating_mul(u64::from(self.burst.max(1)) - 1);
        let due = due.max(now);
        match due.saturating_sub(now.saturating_add(tolerance)) {
            0 => Ok(due.saturating_add(interval)),
            wait => Err(Refusal::RateReached { rate: self, retry_after_ms: wait.div_ceil(1_000) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::amounts::Prices;
    use super::super::records::{FailureCode, RequestKey};
    use super::*;
    use cresset_base::{AccountId, AttemptId, BootId, CredentialId, ModelId, RequestId, SessionId};

    /// A record of `attempts` attempts; the last one has `state` and ended at 1 000, if it ended.
    fn record(state: AttemptState, attempts: u32) -> RequestRecord {
        let attempt = |number| {
            let latest = number == attempts;
            let state = if latest { state } else { AttemptState::Failed };
            let failure = (state == AttemptState::Failed).then_some(FailureCode::GenerationFailed);
            Attempt {
                id: AttemptId::generate(),
                number,
                retry_of: None,
                credential: CredentialId::generate(),
                boot: BootId::generate(),
                state,
                failure,
                finish_reason: None,
                cancel_requested: false,
                prices: Prices::default(),
                reserved: BucketAmounts::ZERO,
                charged: BucketAmounts::ZERO,
                usage: None,
                created_at: UnixMillis(0),
                started_at: None,
                finished_at: state.is_terminal().then_some(UnixMillis(1_000)),
            }
        };
        RequestRecord {
            key: RequestKey {
                account: AccountId::generate(),
                application: None,
                request: RequestId::generate(),
            },
            fingerprint: [1; 32],
            session: SessionId::generate(),
            model: ModelId::generate(),
            stream: false,
            attempts: (1..=attempts).map(attempt).collect(),
        }
    }

    #[test]
    fn each_state_has_its_answer_before_and_after_retention() {
        use AttemptState as S;
        let check = |state, attempts, before, after| {
            let record = record(state, attempts);
            let at = |now| judge(&record, &[1; 32], UnixMillis(now), 500);
            assert_eq!((at(1_499), at(1_500)), (before, after), "{state:?}, {attempts} attempts");
            let other = judge(&record, &[2; 32], UnixMillis(9_000), 500);
            assert_eq!(other, Err(Refusal::FingerprintMismatch), "whatever else holds");
        };
        let expired = Err(Refusal::ResultExpired);
        check(S::Queued, 1, Ok(Seen::InProgress), Ok(Seen::InProgress));
        check(S::Running, 2, Ok(Seen::InProgress), Ok(Seen::InProgress));
        check(S::Completed, 1, Ok(Seen::Completed), expired);
        check(S::Cancelled, 1, Ok(Seen::Cancelled), expired);
        check(S::Failed, 2, Ok(Seen::MayRetry), expired);
        check(S::Failed, 3, Err(Refusal::AttemptsExhausted), expired);
    }

    #[test]
    fn a_burst_passes_and_then_one_in_each_interval() {
        let rate = AdmissionRate { per_minute: 60, burst: 3 };
        let mut due = 0;
        for (now, wait) in [
            (10_000, None),
            (10_000, None),
            (10_000, None),
            (10_000, Some(1_000)),
            (10_600, Some(400)),
            (11_000, None),
            (11_000, Some(1_000)),
            // After a pause the burst is whole again, and no larger.
            (99_000, None),
            (99_000, None),
            (99_000, None),
            (99_000, Some(1_000)),
        ] {
            let found = rate.admit(due, UnixMillis(now));
            let refused = wait.map(|retry_after_ms| Refusal::RateReached { rate, retry_after_ms });
            assert_eq!(found.err(), refused, "at {now}");
            due = found.unwrap_or(due);
        }
        assert_eq!(AdmissionRate::default().admit(0, UnixMillis(7)), Ok(7_000));
    }
}

//! Decides how a request id is answered that the ledger has seen before: one rule for admission and
//! for reads.

use super::commands::Refusal;
use super::records::{AttemptState, RequestRecord};
use crate::clock::UnixMillis;

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
        AttemptState::Failed if record.is_exhausted() => Err(Refusal::AttemptsExhausted),
        AttemptState::Failed => Ok(Seen::MayRetry),
    }
}

#[cfg(test)]
mod tests {
    use super::super::amounts::{BucketAmounts, Prices};
    use super::super::records::{Attempt, FailureCode, RequestKey};
    use super::*;
    use crate::ids::{AccountId, AttemptId, BootId, CredentialId, ModelId, RequestId, SessionId};

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
}

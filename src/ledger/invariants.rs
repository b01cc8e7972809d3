//! The rules that always hold. They are checked before every write of money; a violation is
//! reported and never repaired.

use super::amounts::{BucketAmounts, Usage};
use super::error::ApplyResult;
pub use super::error::Violation;
use super::records::{Attempt, Balance, Balances, RequestKey};
use super::state::{LedgerState, Reservation};
use cresset_base::AccountId;

/// Makes the violation of a rule by a request.
pub(super) fn broken(rule: &'static str, key: &RequestKey) -> Violation {
    Violation { rule, subject: key.to_string() }
}

/// Checks that credited covers debited and reserved, in each bucket.
pub(super) fn check_balances(id: AccountId, balances: &Balances) -> Result<(), Violation> {
    let covered = |bucket: &Balance| bucket.available().is_some();
    if !covered(&balances.trial) || !covered(&balances.premium) {
        let subject = format!("account {id}");
        return Err(Violation { rule: "a bucket is overdrawn", subject });
    }
    Ok(())
}

/// Checks that a request without a live attempt has no reservation.
pub(super) fn check_unreserved(state: &impl LedgerState, key: &RequestKey) -> ApplyResult<()> {
    match state.reservation(key)? {
        None => Ok(()),
        Some(_) => Err(broken("a request without a live attempt is reserved", key).into()),
    }
}

/// Returns the reservation of a live attempt, which has exactly its own.
pub(super) fn check_reservation(
    reservation: Option<Reservation>,
    attempt: &Attempt,
    key: &RequestKey,
) -> Result<Reservation, Violation> {
    reservation
        .filter(|open| open.attempt == attempt.id && open.amount == attempt.reserved)
        .ok_or_else(|| broken("a live attempt lacks its reservation", key))
}

/// Returns the cost of `usage` at the attempt's own prices, taken from its reservation, trial
/// first.
pub(super) fn charge(
    attempt: &Attempt,
    usage: &Usage,
    key: &RequestKey,
) -> Result<BucketAmounts, Violation> {
    attempt
        .prices
        .cost(usage)
        .and_then(|cost| BucketAmounts::take(cost, attempt.reserved))
        .ok_or_else(|| broken("a charge passes its reservation", key))
}

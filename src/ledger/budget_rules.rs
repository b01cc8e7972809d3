//! Holds admissions to quotas and budgets, and sets budgets.

use super::budgets::{
    BudgetOwner, BudgetPeriod, Budgets, Consumption, LimitKind, LimitReached, PeriodUse,
    SpendingLimit,
};
use super::commands::{Admit, Outcome, Refusal};
use super::error::ApplyResult;
use super::records::{Account, Credential};
use super::state::LedgerState;
use cresset_base::UnixMillis;

/// Refuses what would pass a quota or a budget, with what running requests reserve of it.
pub(super) fn check(
    admit: &Admit,
    account: &Account,
    credential: &Credential,
    needed: Consumption,
    now: UnixMillis,
) -> Result<(), Refusal> {
    let units = |amount: Consumption| amount.units.get();
    for period in BudgetPeriod::ALL {
        let budget = |budgets: &Budgets| budgets.of(period).map(|limit| limit.units.get());
        let [of_account, of_key] =
            [&account.used, &credential.used].map(|used| used.current(period, now));
        let amounts = |used: PeriodUse| [used.spent, used.reserved, needed].map(units);
        let tokens = [of_account.spent, of_account.reserved, needed].map(|amount| amount.tokens);
        let check = |kind, allowed, amounts| check_one(kind, period, allowed, amounts, now);
        check(LimitKind::PlanTokens, admit.quotas.of(period), tokens)?;
        check(LimitKind::AccountBudget, budget(&account.budgets), amounts(of_account))?;
        check(LimitKind::KeyBudget, budget(&credential.budgets), amounts(of_key))?;
    }
    Ok(())
}

fn check_one(
    kind: LimitKind,
    period: BudgetPeriod,
    allowed: Option<u64>,
    [spent, reserved, needed]: [u64; 3],
    now: UnixMillis,
) -> Result<(), Refusal> {
    let Some(allowed) = allowed else { return Ok(()) };
    let sum = spent.checked_add(reserved).and_then(|sum| sum.checked_add(needed));
    if sum.is_some_and(|sum| sum <= allowed) {
        return Ok(());
    }
    let renews_at = period.renewal_after(now);
    let renews_in_ms = renews_at.0.saturating_sub(now.0);
    Err(Refusal::LimitReached(LimitReached {
        kind,
        period,
        allowed,
        spent,
        reserved,
        needed,
        renews_at,
        renews_in_ms,
    }))
}

/// Sets or removes a budget. It counts what was spent before in the same period.
pub(super) fn set(
    state: &mut impl LedgerState,
    owner: BudgetOwner,
    period: BudgetPeriod,
    limit: Option<SpendingLimit>,
) -> ApplyResult {
    match owner {
        BudgetOwner::Account(id) => {
            let mut account = state.account(id)?.ok_or(Refusal::AccountNotFound)?;
            account.budgets.set(period, limit);
            state.put_account(&account)?;
        }
        BudgetOwner::Key(id) => {
            let mut credential = state.credential(id)?.ok_or(Refusal::CredentialNotFound)?;
            credential.budgets.set(period, limit);
            state.put_credential(&credential)?;
        }
    }
    Ok(Outcome::Done)
}

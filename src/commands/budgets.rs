//! Budgets of accounts and keys: set by operators, shown with what is used of them.

use super::error::AdminError;
use super::operator::Operator;
use cresset_base::UnixMillis;
use cresset_ledger::{
    Account, BudgetOwner, BudgetPeriod, Budgets, CalendarUse, Command, CredentialKind,
    Microcredits, PeriodUse, Refusal, SpendingLimit, TokenQuotas,
};
use cresset_request::Plan;
use cresset_store::BudgetNotice;
use serde_json::{Value, json};

type Result<T = Value, E = AdminError> = std::result::Result<T, E>;

impl Operator<'_> {
    /// Sets a budget, or ends it where `units` is `None`.
    pub(super) async fn set_budget(
        &self,
        owner: BudgetOwner,
        period: BudgetPeriod,
        units: Option<u64>,
        alert_percent: Option<u8>,
    ) -> Result {
        let limit = spending_limit(units, alert_percent)?;
        if let BudgetOwner::Key(id) = owner {
            let found = self.store.read().await?.credential(id).await?;
            if found.is_none_or(|found| found.kind != CredentialKind::ApiKey) {
                return Err(Refusal::CredentialNotFound.into());
            }
        }
        self.store.submit(Command::SetBudget { owner, period, limit }).await?;
        match owner {
            BudgetOwner::Account(id) => self.show_account(id).await,
            BudgetOwner::Key(id) => self.show_credential(id).await,
        }
    }

    /// The tokens that the account's plan allows.
    pub(super) fn quotas_of(&self, account: &Account) -> TokenQuotas {
        if let Some(live) = self.live {
            return live.node.plans.of(account).limits.quotas();
        }
        let plans = &self.settings.plans;
        let plan = plans.get(&account.plan).or_else(|| plans.get("default"));
        plan.map(Plan::quotas).unwrap_or_default()
    }
}

fn spending_limit(units: Option<u64>, alert_percent: Option<u8>) -> Result<Option<SpendingLimit>> {
    let invalid = |text: &str| Err(AdminError::Invalid(text.to_owned()));
    if alert_percent.is_some_and(|percent| !(1..=100).contains(&percent)) {
        return invalid("the percentage at which a budget is told is 1 to 100");
    }
    let Some(units) = units else {
        return match alert_percent {
            None => Ok(None),
            Some(_) => invalid("a budget that is ended has no percentage at which it is told"),
        };
    };
    let units = Microcredits::new(units).ok_or_else(|| {
        AdminError::Invalid(format!("{units} is more than {}", Microcredits::MAX))
    })?;
    Ok(Some(SpendingLimit { units, alert_percent }))
}

/// What is used of the present day and month, with the limits on it.
pub(super) fn spending(
    budgets: &Budgets,
    used: &CalendarUse,
    quotas: TokenQuotas,
    now: UnixMillis,
) -> Value {
    let row = |period: BudgetPeriod| {
        let PeriodUse { spent, reserved, .. } = used.current(period, now);
        let limit = budgets.of(period);
        json!({
            "period": period,
            "spentUnits": spent.units,
            "reservedUnits": reserved.units,
            "budgetUnits": limit.map(|limit| limit.units),
            "alert_percent": limit.and_then(|limit| limit.alert_percent),
            "near_budget": limit.is_some_and(|limit| limit.is_near(spent.units)),
            "tokens": spent.tokens,
            "reserved_tokens": reserved.tokens,
            "quota_tokens": quotas.of(period),
            "renews_at": period.renewal_after(now).seconds(),
        })
    };
    Value::Array(vec![row(BudgetPeriod::Day), row(BudgetPeriod::Month)])
}

/// How much of each budget is spent, such as `day 83 %, month 12 %`; null without budgets.
pub(super) fn budget_use(budgets: &Budgets, used: &CalendarUse, now: UnixMillis) -> Value {
    let part = |period: BudgetPeriod| {
        let limit = u128::from(budgets.of(period)?.units.get());
        let spent = u128::from(used.current(period, now).spent.units.get());
        let percent = (spent * 100).checked_div(limit).unwrap_or(100);
        Some(format!("{} {percent} %", period.name()))
    };
    let parts: Vec<String> =
        [BudgetPeriod::Day, BudgetPeriod::Month].into_iter().filter_map(part).collect();
    if parts.is_empty() { Value::Null } else { parts.join(", ").into() }
}

/// The budgets of which operators were told last.
pub(super) fn notices(notices: &[BudgetNotice]) -> Value {
    notices.iter().map(notice).collect()
}

fn notice(notice: &BudgetNotice) -> Value {
    let BudgetNotice { at, alert } = notice;
    let (account, key) = match alert.owner {
        BudgetOwner::Account(id) => (Some(id), None),
        BudgetOwner::Key(id) => (None, Some(id)),
    };
    json!({
        "at": at.seconds(),
        "account_id": account,
        "key_id": key,
        "period": alert.period,
        "budgetUnits": alert.limit.units,
        "alert_percent": alert.limit.alert_percent,
        "spentUnits": alert.spent,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_has_an_amount_and_perhaps_a_percentage() {
        let check = |units, percent, holds| {
            assert_eq!(spending_limit(units, percent).is_ok(), holds, "{units:?} {percent:?}");
        };
        check(Some(0), None, true);
        check(Some(5), Some(1), true);
        check(Some(5), Some(100), true);
        check(None, None, true);
        check(Some(5), Some(0), false);
        check(Some(5), Some(101), false);
        check(None, Some(80), false);
        check(Some(1 << 53), None, false);
    }
}

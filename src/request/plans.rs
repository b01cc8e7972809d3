//! The plans in force and the rate of requests that an account may send, by its plan: the generic
//! cell rate algorithm. Plans may change while the node runs.

use crate::settings::Plan;
use cresset_base::AccountId;
use cresset_ledger::{Account, Refusal, TokenQuotas};
use cresset_pool::ServedModel;
use governor::clock::Clock;
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

/// The limits of accounts, by the name of their plan.
#[derive(Default)]
pub struct Plans(RwLock<BTreeMap<String, Arc<PlanInForce>>>);

/// A plan in force, and what accounts have used of its rate.
#[derive(Debug)]
pub struct PlanInForce {
    pub name: String,
    pub limits: Plan,
    /// Keyed by account: all credentials of an account share its rate.
    rate: Arc<DefaultKeyedRateLimiter<AccountId>>,
}

impl Plan {
    /// The tokens that the plan allows an account.
    pub fn quotas(&self) -> TokenQuotas {
        TokenQuotas { day: self.tokens_per_day, month: self.tokens_per_month }
    }
}

/// Whether the plan may use the model.
pub(super) fn allows(plan: &Plan, model: &ServedModel) -> bool {
    let (id, name) = (model.qualified.id().to_string(), &model.qualified.manifest().name);
    plan.models.as_ref().is_none_or(|models| models.iter().any(|m| m == name || *m == id))
}

impl PlanInForce {
    /// What accounts have used of an unchanged rate `before` stays used.
    fn new(name: &str, limits: &Plan, before: Option<&Self>) -> Arc<Self> {
        let rate = |plan: &Plan| (plan.requests_per_minute, plan.burst);
        let unchanged = before.filter(|before| rate(&before.limits) == rate(limits));
        let fresh = || RateLimiter::keyed(quota(limits.requests_per_minute, limits.burst)).into();
        let rate = unchanged.map_or_else(fresh, |before| before.rate.clone());
        Arc::new(Self { name: name.to_owned(), limits: limits.clone(), rate })
    }

    /// Counts one request of an account. The error is the time after which the next one is allowed.
    pub fn check_rate(&self, account: AccountId) -> Result<(), Duration> {
        let checked = self.rate.check_key(&account);
        checked.map_err(|not_until| not_until.wait_time_from(self.rate.clock().now()))
    }
}

impl Plans {
    /// `plans` has one with the name `default`.
    pub fn new(plans: &BTreeMap<String, Plan>) -> Self {
        let new = Self::default();
        new.put_in_force(plans);
        new
    }

    /// Replaces the plans for new requests. Running ones go on under the plan that they began with.
    pub fn put_in_force(&self, plans: &BTreeMap<String, Plan>) {
        let mut by_name = self.0.write();
        let next = |(name, plan): (&String, &Plan)| {
            let before = by_name.get(name).map(Arc::as_ref);
            (name.clone(), PlanInForce::new(name, plan, before))
        };
        *by_name = plans.iter().map(next).collect();
    }

    /// The plan that an account names; an unknown name gets `default`, so that renaming a plan
    /// never locks accounts out.
    pub fn of(&self, account: &Account) -> Arc<PlanInForce> {
        let by_name = self.0.read();
        let found = by_name.get(&account.plan).or_else(|| by_name.get("default"));
        found.expect("invariant: a valid configuration has a default plan").clone()
    }

    /// All plans in force, by name.
    pub fn all(&self) -> Vec<Arc<PlanInForce>> {
        self.0.read().values().cloned().collect()
    }

    pub fn names(&self) -> Vec<String> {
        self.all().iter().map(|plan| plan.name.clone()).collect()
    }
}

/// The limit of its account at which an admission was refused.
pub(super) fn limit_of(refusal: &Refusal) -> Option<&'static str> {
    match refusal {
        Refusal::LimitReached(limit) => Some(limit.kind.name()),
        Refusal::RateReached { .. } => Some("requests_per_minute"),
        Refusal::ConcurrencyLimit { .. } => Some("max_concurrent"),
        Refusal::InsufficientCredits { .. } | Refusal::CreditsReserved { .. } => Some("credits"),
        _ => None,
    }
}

fn quota(per_minute: u32, burst: u32) -> Quota {
    let at_least_one = |n: u32| NonZeroU32::new(n).unwrap_or(NonZeroU32::MIN);
    Quota::per_minute(at_least_one(per_minute)).allow_burst(at_least_one(burst))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_base::UnixMillis;

    fn account(plan: &str) -> Account {
        let id = AccountId::generate();
        Account::new(id, "a".into(), plan.into(), UnixMillis(0))
    }

    fn small(burst: u32) -> BTreeMap<String, Plan> {
        let small = Plan { burst, requests_per_minute: 1, ..Plan::default() };
        BTreeMap::from([("default".into(), Plan::default()), ("small".into(), small)])
    }

    #[test]
    fn the_burst_passes_then_that_account_alone_is_limited() {
        let limit = Plans::new(&small(3));
        let count = |account: &Account| limit.of(account).check_rate(account.id);
        let (busy, calm) = (account("small"), account("small"));
        assert!((0..3).all(|_| count(&busy).is_ok()));
        let Err(retry_after) = count(&busy) else { panic!("the fourth passed") };
        assert!(retry_after.as_secs() > 30, "one a minute refills slowly: {retry_after:?}");
        assert!(count(&calm).is_ok());
        assert!(count(&account("no such plan")).is_ok(), "unknown plans are the default one");
    }

    #[test]
    fn a_change_of_other_limits_gives_no_further_burst() {
        let limit = Plans::new(&small(1));
        let count = |account: &Account| limit.of(account).check_rate(account.id);
        let busy = account("small");
        assert!(count(&busy).is_ok());
        let mut plans = small(1);
        plans.get_mut("small").unwrap().max_output_tokens = Some(7);
        limit.put_in_force(&plans);
        assert_eq!(limit.of(&busy).limits.max_output_tokens, Some(7));
        assert!(count(&busy).is_err());
        limit.put_in_force(&small(2));
        assert!(count(&busy).is_ok(), "another rate counts from now on");
        plans.remove("small");
        limit.put_in_force(&plans);
        assert_eq!(limit.of(&busy).limits.burst, Plan::default().burst);
    }
}

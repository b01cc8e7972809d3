//! The plans in force and the rate of requests that an account may send, by its plan: the generic
//! cell rate algorithm. Plans may change while the node runs.

use crate::config::Plan;
use crate::ids::AccountId;
use crate::ledger::{Account, Refusal, TokenQuotas};
use governor::clock::{Clock, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// The limits of accounts, by the name of their plan.
#[derive(Default)]
pub struct Plans {
    by_name: RwLock<BTreeMap<String, PlanInForce>>,
    clock: DefaultClock,
}

#[derive(Clone)]
struct PlanInForce {
    plan: Arc<Plan>,
    /// Keyed by account: all credentials of an account share its rate.
    rate: Arc<DefaultKeyedRateLimiter<AccountId>>,
}

impl Plan {
    /// The tokens that the plan allows an account.
    pub fn quotas(&self) -> TokenQuotas {
        TokenQuotas { day: self.tokens_per_day, month: self.tokens_per_month }
    }
}

impl PlanInForce {
    fn new(plan: &Plan) -> Self {
        let quota = quota(plan.requests_per_minute, plan.burst);
        Self { plan: Arc::new(plan.clone()), rate: Arc::new(RateLimiter::keyed(quota)) }
    }

    /// The plan with other limits. What accounts have used of an unchanged rate stays used.
    fn changed_to(&self, plan: &Plan) -> Self {
        let rate = |plan: &Plan| (plan.requests_per_minute, plan.burst);
        if rate(&self.plan) == rate(plan) {
            return Self { plan: Arc::new(plan.clone()), rate: self.rate.clone() };
        }
        Self::new(plan)
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
        let mut by_name = self.by_name.write().unwrap_or_else(PoisonError::into_inner);
        let next = |(name, plan): (&String, &Plan)| {
            let known = by_name.get(name);
            (name.clone(), known.map_or_else(|| PlanInForce::new(plan), |p| p.changed_to(plan)))
        };
        *by_name = plans.iter().map(next).collect();
    }

    /// The plan that an account names; an unknown name gets `default`, so that renaming a plan
    /// never locks accounts out.
    pub fn of(&self, account: &Account) -> Arc<Plan> {
        self.find(account).plan
    }

    /// The name of the plan in force for an account.
    pub fn name_of(&self, account: &Account) -> String {
        let by_name = self.by_name.read().unwrap_or_else(PoisonError::into_inner);
        by_name.get_key_value(&account.plan).map_or("default", |(name, _)| name).to_owned()
    }

    /// All plans in force, by name.
    pub fn all(&self) -> BTreeMap<String, Arc<Plan>> {
        let by_name = self.by_name.read().unwrap_or_else(PoisonError::into_inner);
        by_name.iter().map(|(name, found)| (name.clone(), found.plan.clone())).collect()
    }

    pub fn names(&self) -> Vec<String> {
        self.by_name.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    /// Counts one request. The error is the time after which the next one is allowed.
    pub fn check_rate(&self, account: &Account) -> Result<(), Duration> {
        let found = self.find(account);
        let checked = found.rate.check_key(&account.id);
        checked.map_err(|not_until| not_until.wait_time_from(self.clock.now()))
    }

    fn find(&self, account: &Account) -> PlanInForce {
        let by_name = self.by_name.read().unwrap_or_else(PoisonError::into_inner);
        let found = by_name.get(&account.plan).or_else(|| by_name.get("default"));
        found.expect("invariant: a valid configuration has a default plan").clone()
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
    use crate::clock::UnixMillis;

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
        let (busy, calm) = (account("small"), account("small"));
        assert!((0..3).all(|_| limit.check_rate(&busy).is_ok()));
        let Err(retry_after) = limit.check_rate(&busy) else { panic!("the fourth passed") };
        assert!(retry_after.as_secs() > 30, "one a minute refills slowly: {retry_after:?}");
        assert!(limit.check_rate(&calm).is_ok());
        assert!(
            limit.check_rate(&account("no such plan")).is_ok(),
            "unknown plans are the default one"
        );
    }

    #[test]
    fn a_change_of_other_limits_gives_no_further_burst() {
        let limit = Plans::new(&small(1));
        let busy = account("small");
        assert!(limit.check_rate(&busy).is_ok());
        let mut plans = small(1);
        plans.get_mut("small").unwrap().max_output_tokens = Some(7);
        limit.put_in_force(&plans);
        assert_eq!(limit.of(&busy).max_output_tokens, Some(7));
        assert!(limit.check_rate(&busy).is_err());
        limit.put_in_force(&small(2));
        assert!(limit.check_rate(&busy).is_ok(), "another rate counts from now on");
        plans.remove("small");
        limit.put_in_force(&plans);
        assert_eq!(limit.of(&busy).burst, Plan::default().burst);
    }
}

//! The rate of requests that an account may send, by its plan: the generic cell rate algorithm.

use crate::config::{Config, Plan};
use crate::ids::AccountId;
use crate::ledger::Account;
use governor::clock::{Clock, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

/// One limiter per plan, keyed by account: all credentials of an account share its rate.
pub struct RateLimit {
    plans: BTreeMap<String, DefaultKeyedRateLimiter<AccountId>>,
    clock: DefaultClock,
}

impl RateLimit {
    pub fn new(config: &Config) -> Self {
        let limiter = |plan: &Plan| RateLimiter::keyed(quota(plan.requests_per_minute, plan.burst));
        let plans = config.plans.iter().map(|(name, plan)| (name.clone(), limiter(plan))).collect();
        Self { plans, clock: DefaultClock::default() }
    }

    /// Counts one request. The error is the time after which the next one is allowed.
    pub fn check(&self, account: &Account) -> Result<(), Duration> {
        let limiter = self.plans.get(&account.plan).unwrap_or_else(|| &self.plans["default"]);
        let checked = limiter.check_key(&account.id);
        checked.map_err(|not_until| not_until.wait_time_from(self.clock.now()))
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
    use crate::ledger::AccountStatus;

    fn account(plan: &str) -> Account {
        let id = AccountId::generate();
        let (status, created_at) = (AccountStatus::Active, UnixMillis(0));
        Account { id, name: "a".into(), plan: plan.into(), status, created_at, in_flight: 0 }
    }

    #[test]
    fn the_burst_passes_then_that_account_alone_is_limited() {
        let mut config = Config::default();
        config
            .plans
            .insert("small".into(), Plan { burst: 3, requests_per_minute: 1, ..Plan::default() });
        let limit = RateLimit::new(&config);
        let (busy, calm) = (account("small"), account("small"));
        assert!((0..3).all(|_| limit.check(&busy).is_ok()));
        let Err(retry_after) = limit.check(&busy) else { panic!("the fourth passed") };
        assert!(retry_after.as_secs() > 30, "one a minute refills slowly: {retry_after:?}");
        assert!(limit.check(&calm).is_ok());
        assert!(limit.check(&account("no such plan")).is_ok(), "unknown plans are the default one");
    }
}

//! Rate fuses (the generic cell rate algorithm): completion requests by account and plan, failed credentials by address.

use super::error::ApiError;
use crate::config::{Config, Plan};
use crate::ids::AccountId;
use crate::ledger::Account;
use governor::clock::{Clock, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroU32;

/// One fuse a plan, keyed by account: all credentials of an account share it.
pub struct RateFuse {
    plans: BTreeMap<String, DefaultKeyedRateLimiter<AccountId>>,
    clock: DefaultClock,
}

impl RateFuse {
    pub fn new(config: &Config) -> Self {
        let fuse = |plan: &Plan| RateLimiter::keyed(quota(plan.requests_per_minute, plan.burst));
        let plans = config.plans.iter().map(|(name, plan)| (name.clone(), fuse(plan))).collect();
        Self { plans, clock: DefaultClock::default() }
    }

    pub fn check(&self, account: &Account) -> Result<(), ApiError> {
        let limiter = self.plans.get(&account.plan).unwrap_or_else(|| &self.plans["default"]);
        limiter
            .check_key(&account.id)
            .map_err(|not_until| ApiError::RateLimited { retry_after: not_until.wait_time_from(self.clock.now()) })
    }
}

/// Failed credentials an address may send a minute.
pub struct GuessFuse(DefaultKeyedRateLimiter<IpAddr>);

/// Addresses remembered before idle ones are forgotten.
const REMEMBERED_ADDRESSES: usize = 10_000;

impl GuessFuse {
    pub fn new(per_minute: u32) -> Self {
        Self(RateLimiter::keyed(quota(per_minute, per_minute)))
    }

    /// Counts one failure; false once the address has used up its minute.
    pub fn allow(&self, address: IpAddr) -> bool {
        if self.0.len() > REMEMBERED_ADDRESSES {
            self.0.retain_recent();
        }
        self.0.check_key(&address).is_ok()
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
    fn the_burst_passes_then_the_fuse_blows_for_that_account_alone() {
        let mut config = Config::default();
        config.plans.insert("small".into(), Plan { burst: 3, requests_per_minute: 1, ..Plan::default() });
        let fuse = RateFuse::new(&config);
        let (busy, calm) = (account("small"), account("small"));
        assert!((0..3).all(|_| fuse.check(&busy).is_ok()));
        let Err(ApiError::RateLimited { retry_after }) = fuse.check(&busy) else { panic!("the fourth passed") };
        assert!(retry_after.as_secs() > 30, "one a minute refills slowly: {retry_after:?}");
        assert!(fuse.check(&calm).is_ok());
        assert!(fuse.check(&account("no such plan")).is_ok(), "unknown plans are the default one");
    }

    #[test]
    fn guesses_run_out_by_address() {
        let fuse = GuessFuse::new(2);
        let (one, other) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        assert_eq!([fuse.allow(one), fuse.allow(one), fuse.allow(one)], [true, true, false]);
        assert!(fuse.allow(other));
    }
}

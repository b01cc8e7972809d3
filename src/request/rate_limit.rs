//! Rate fuses (the generic cell rate algorithm): completion requests by account and plan, failed
//! credentials by address.

use crate::config::{Config, Plan};
use crate::ids::AccountId;
use crate::ledger::Account;
use crate::server::error::ApiError;
use crate::server::transport::permits::Peer;
use governor::clock::{Clock, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

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
        limiter.check_key(&account.id).map_err(|not_until| ApiError::RateLimited {
            retry_after: not_until.wait_time_from(self.clock.now()),
        })
    }
}

/// Failed credentials a peer may send a minute. Bounded in memory, whoever attacks it.
pub struct GuessFuse {
    /// Time that one failure costs.
    cost: Duration,
    /// By peer: when everything it has failed will be paid off.
    debts: Mutex<HashMap<Peer, Instant>>,
}

/// Peers remembered at once. Further ones count as over their limit until some of these are
/// forgotten.
const REMEMBERED_PEERS: usize = 10_000;
const MINUTE: Duration = Duration::from_mins(1);

impl GuessFuse {
    pub fn new(per_minute: u32) -> Self {
        Self { cost: MINUTE / per_minute.max(1), debts: Mutex::default() }
    }

    /// Counts one failure; false once the peer has used up its minute.
    pub fn allow(&self, peer: Peer, now: Instant) -> bool {
        let mut debts = self.debts.lock().unwrap_or_else(PoisonError::into_inner);
        if debts.len() >= REMEMBERED_PEERS && !debts.contains_key(&peer) {
            debts.retain(|_, paid| *paid > now);
            if debts.len() >= REMEMBERED_PEERS {
                return false;
            }
        }
        let paid = debts.entry(peer).or_insert(now);
        let owed = (*paid).max(now) + self.cost;
        let within = owed <= now + MINUTE;
        if within {
            *paid = owed;
        }
        within
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
        config
            .plans
            .insert("small".into(), Plan { burst: 3, requests_per_minute: 1, ..Plan::default() });
        let fuse = RateFuse::new(&config);
        let (busy, calm) = (account("small"), account("small"));
        assert!((0..3).all(|_| fuse.check(&busy).is_ok()));
        let Err(ApiError::RateLimited { retry_after }) = fuse.check(&busy) else {
            panic!("the fourth passed")
        };
        assert!(retry_after.as_secs() > 30, "one a minute refills slowly: {retry_after:?}");
        assert!(fuse.check(&calm).is_ok());
        assert!(fuse.check(&account("no such plan")).is_ok(), "unknown plans are the default one");
    }

    fn peer(number: u32) -> Peer {
        std::net::IpAddr::from(number.to_be_bytes()).into()
    }

    #[test]
    fn guesses_run_out_by_peer_and_come_back() {
        let (fuse, start) = (GuessFuse::new(2), Instant::now());
        let allow =
            |number, seconds| fuse.allow(peer(number), start + Duration::from_secs(seconds));
        assert_eq!([allow(1, 0), allow(1, 0), allow(1, 0)], [true, true, false]);
        assert!(allow(2, 0));
        assert_eq!([allow(1, 29), allow(1, 31), allow(1, 31)], [false, true, false]);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (fuse, start) = (GuessFuse::new(60), Instant::now());
        let most = REMEMBERED_PEERS as u32;
        assert!((0..most).all(|number| fuse.allow(peer(number), start)));
        assert!(!fuse.allow(peer(most), start), "there is no room for another");
        assert!(fuse.allow(peer(0), start), "those that are known go on");
        assert!(
            fuse.allow(peer(most), start + Duration::from_secs(3)),
            "the others have been forgotten"
        );
        assert_eq!(fuse.debts.lock().unwrap().len(), 1);
    }
}

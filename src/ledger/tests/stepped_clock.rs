//! Budgets under a clock that is set back and forward again.

use super::{World, check, uuid};
use crate::audit::AuditSource;
use crate::budgets::{BudgetPeriod, Consumption, REMEMBERED_PERIODS};
use cresset_base::{AccountId, UnixMillis};
use proptest::prelude::*;
use std::collections::BTreeMap;

const DAY_MS: u64 = 86_400_000;

/// January, February and back, twice: neither budget is spent twice, of the account or of its key.
#[test]
fn a_budget_is_spent_once_whatever_the_clock_does() {
    for owner in ["account a", "key k"] {
        for (period, step) in [("month", 31 * DAY_MS), ("day", DAY_MS)] {
            let kind = owner.split(' ').next().unwrap();
            let spent = format!("refused {kind}_budget {period} [40, 37, 0, 37]");
            let script = "budget OWNER PERIOD 40      -> done
                 admit a r 1 k 30 7               -> admitted #1 queued 37+0
                 settle a r 1 30 0 7 stop         -> #1 completed 37+0
                 at LATER                         -> ok
                 admit a s 2 k 30 7               -> admitted #1 queued 37+0
                 settle a s 2 30 0 7 stop         -> #1 completed 37+0
                 at 1                             -> ok
                 admit a t 3 k 30 7               -> SPENT LATER
                 admit a u 4 k 1 1                -> admitted #1 queued 2+0
                 at LATER                         -> ok
                 admit a t 5 k 30 7               -> SPENT RENEWED
                 settle a u 4 1 0 1 stop          -> #1 completed 2+0
                 at 2                             -> ok
                 admit a v 6 k 1 1                -> REST";
            let (later, renewed) = match period {
                "day" => (step, 2 * step),
                _ => (step, 59 * DAY_MS),
            };
            let rest = format!("refused {kind}_budget {period} [40, 39, 0, 2] {later}");
            let filled = script
                .replace("OWNER", owner)
                .replace("PERIOD", period)
                .replace("SPENT", &spent)
                .replace("LATER", &later.to_string())
                .replace("RENEWED", &renewed.to_string())
                .replace("REST", &rest);
            check(&filled);
        }
    }
}

/// What each day or month has spent, by the journal alone.
fn journalled(world: &World, period: BudgetPeriod) -> BTreeMap<u32, u64> {
    let entries = &world.state.entries;
    let mut sums = BTreeMap::new();
    for entry in entries {
        let Some((_, attempt)) = entry.settlement() else { continue };
        let admitted =
            entries.iter().find(|entry| entry.reservation().is_some_and(|(_, of)| of == attempt));
        let number = period.number_at(admitted.unwrap().at);
        *sums.entry(number).or_default() += entry.amount.total().get();
    }
    sums
}

/// Steps of the clock between requests, some of which end in a later period: each remembered period
/// has exactly what the journal says, and audits agree.
fn check_steps(steps: &[(u64, bool, u32)]) {
    let mut world = World::new();
    for line in ["account a", "key k a", "key l a", "grant a premium 100000 p"] {
        assert_eq!(world.run(line), "done");
    }
    let mut open = Vec::new();
    for (number, &(day, other_key, units)) in steps.iter().enumerate() {
        world.run(&format!("at {}", day * 10 * DAY_MS));
        let key = if other_key { "l" } else { "k" };
        let admitted = world.run(&format!("admit a r{number} {number} {key} {units} 0 in 1000"));
        assert!(admitted.starts_with("admitted"), "{admitted}");
        open.push((number, units));
        if units % 3 > 0 {
            for (number, units) in open.drain(..) {
                let settled = world.run(&format!("settle a r{number} {number} {units} 0 0 stop"));
                assert!(settled.contains("completed"), "{settled}");
            }
        }
    }
    assert_eq!(world.state.audit(), Vec::<String>::new());
    let account = AuditSource::account(&world.state, AccountId(uuid("a"))).unwrap().unwrap();
    for period in BudgetPeriod::ALL {
        let (sums, used) = (journalled(&world, period), account.used.of(period));
        let ended = used.uses.iter().filter(|of| of.reserved == Consumption::default());
        assert!(ended.count() <= REMEMBERED_PERIODS);
        for used in used.uses.iter().filter(|of| of.number > used.forgotten) {
            let sum = sums.get(&used.number).copied().unwrap_or_default();
            assert_eq!(used.spent.units.get(), sum, "{period:?} {}", used.number);
        }
        let known = |number: &u32| {
            *number <= used.forgotten || used.of(*number).spent != Consumption::default()
        };
        assert!(sums.iter().filter(|(_, sum)| **sum > 0).all(|(number, _)| known(number)));
        let now = used.of(period.number_at(UnixMillis(world.now.0)));
        assert_eq!(now.number, used.latest);
    }
}

/// An attempt that is open over more periods than are remembered, in a day that comes back.
#[test]
fn open_attempts_keep_their_period() {
    let days = [4, 9, 10, 11, 12, 13, 14, 15, 16, 17, 4];
    let mut steps: Vec<_> = days.map(|day| (day, false, 3)).into();
    check_steps(&steps);
    steps.push((4, false, 1));
    check_steps(&steps);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn periods_have_what_their_own_entries_say(
        steps in proptest::collection::vec((1..20_u64, any::<bool>(), 0..9_u32), 1..40),
    ) {
        check_steps(&steps);
    }
}

//! What accounts and keys may spend in a day or a month, and what they have spent of it. A use is
//! part of the rows that its admission and settlement change anyway, so nothing else decides.

use super::amounts::Microcredits;
use chrono::{DateTime, Datelike, Days, Months, NaiveDate, NaiveTime};
use cresset_base::{AccountId, CredentialId, UnixMillis};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A span of the calendar, in UTC by the ledger's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BudgetPeriod {
    Day,
    Month,
}

impl BudgetPeriod {
    /// The later renewal first: a refusal names the limit that lasts longest.
    pub const ALL: [Self; 2] = [Self::Month, Self::Day];

    pub fn name(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Month => "month",
        }
    }

    /// The number of the period that `at` lies in, from 1 for the first one of 1970.
    pub fn number_at(self, at: UnixMillis) -> u32 {
        let first = |day: NaiveDate| match self {
            Self::Day => day.signed_duration_since(NaiveDate::default()).num_days(),
            Self::Month => i64::from(day.year() - 1970) * 12 + i64::from(day.month0()),
        };
        date(at).and_then(|day| u32::try_from(first(day) + 1).ok()).unwrap_or(u32::MAX)
    }

    /// The first day of the period of this number; `None` for 0 and beyond the calendar.
    pub fn first_day(self, number: u32) -> Option<NaiveDate> {
        let after = number.checked_sub(1)?;
        match self {
            Self::Day => NaiveDate::default().checked_add_days(Days::new(after.into())),
            Self::Month => NaiveDate::default().checked_add_months(Months::new(after)),
        }
    }

    /// The beginning of the period that follows the one of `at`.
    pub fn renewal_after(self, at: UnixMillis) -> UnixMillis {
        let next = date(at).and_then(|day| match self {
            Self::Day => day.checked_add_days(Days::new(1)),
            Self::Month => day.with_day(1)?.checked_add_months(Months::new(1)),
        });
        let begin = next.map(|day| day.and_time(NaiveTime::MIN).and_utc().timestamp_millis());
        UnixMillis(begin.and_then(|at| u64::try_from(at).ok()).unwrap_or(u64::MAX))
    }
}

fn date(at: UnixMillis) -> Option<NaiveDate> {
    let milliseconds = i64::try_from(at.0).ok()?;
    DateTime::from_timestamp_millis(milliseconds).map(|at| at.date_naive())
}

/// Money and tokens together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Consumption {
    pub units: Microcredits,
    /// Tokens of prompts and answers together.
    pub tokens: u64,
}

impl Consumption {
    /// `None` when a part would pass its largest value.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        let units = self.units.checked_add(other.units)?;
        Some(Self { units, tokens: self.tokens.checked_add(other.tokens)? })
    }

    /// `None` when a part would be negative.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        let units = self.units.checked_sub(other.units)?;
        Some(Self { units, tokens: self.tokens.checked_sub(other.tokens)? })
    }
}

/// What the attempts that were admitted in one period reserve and have spent. An attempt counts in
/// the period of its admission, also where it ends later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeriodUse {
    /// As `BudgetPeriod::number_at`.
    pub number: u32,
    pub reserved: Consumption,
    pub spent: Consumption,
}

/// Periods that are remembered of each kind. After a step of the clock, uses go on exactly where
/// they were in the latest of this many days and months that had any. Periods with open attempts
/// are remembered beyond it, so that each end finds what it frees.
pub(super) const REMEMBERED_PERIODS: usize = 8;

/// The uses of an account or a key in periods of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeriodUses {
    /// The period of the last admission; 0 before the first one. A clock that was set back may
    /// have left later ones.
    pub latest: u32,
    /// No use is missing in periods after this one; 0 where none is missing at all.
    pub forgotten: u32,
    /// Ordered by number; at most `REMEMBERED_PERIODS`, and those in which attempts are open.
    pub uses: Vec<PeriodUse>,
}

impl PeriodUses {
    /// The use in the period of this number; none where it is not remembered.
    pub fn of(&self, number: u32) -> PeriodUse {
        let found = self.uses.iter().find(|used| used.number == number);
        found.copied().unwrap_or(PeriodUse { number, ..PeriodUse::default() })
    }

    fn reserve(&self, number: u32, amount: Consumption) -> Option<Self> {
        let mut after = Self { latest: number, ..self.clone() };
        let place = after.uses.partition_point(|used| used.number < number);
        if after.uses.get(place).is_none_or(|used| used.number != number) {
            after.uses.insert(place, self.of(number));
        }
        let reserved = &mut after.uses[place].reserved;
        *reserved = reserved.checked_add(amount)?;
        after.forget_earliest();
        Some(after)
    }

    /// Forgets the earliest periods in which nothing is open, but that of the last admission, while
    /// there are too many.
    fn forget_earliest(&mut self) {
        while self.uses.len() > REMEMBERED_PERIODS {
            let ended = |used: &PeriodUse| {
                used.number != self.latest && used.reserved == Consumption::default()
            };
            let Some(first) = self.uses.iter().position(ended) else { return };
            self.forgotten = self.forgotten.max(self.uses.remove(first).number);
        }
    }

    fn settle(&self, number: u32, reserved: Consumption, spent: Consumption) -> Option<Self> {
        let mut after = self.clone();
        let Some(used) = after.uses.iter_mut().find(|used| used.number == number) else {
            return (number <= self.forgotten).then_some(after);
        };
        used.reserved = used.reserved.checked_sub(reserved)?;
        used.spent = used.spent.checked_add(spent)?;
        after.forget_earliest();
        Some(after)
    }
}

/// The uses of an account or a key in days and in months.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CalendarUse {
    pub day: PeriodUses,
    pub month: PeriodUses,
}

impl CalendarUse {
    pub fn of(&self, period: BudgetPeriod) -> &PeriodUses {
        match period {
            BudgetPeriod::Day => &self.day,
            BudgetPeriod::Month => &self.month,
        }
    }

    /// The use in the period that `now` lies in.
    pub fn current(&self, period: BudgetPeriod, now: UnixMillis) -> PeriodUse {
        self.of(period).of(period.number_at(now))
    }

    /// The day of the last admission (UTC).
    pub fn last_day(&self) -> Option<NaiveDate> {
        BudgetPeriod::Day.first_day(self.day.latest)
    }

    /// The use after an admission at `now`. `None` when the amounts overflow.
    pub fn reserve(&self, amount: Consumption, now: UnixMillis) -> Option<Self> {
        self.changed(now, |used, number| used.reserve(number, amount))
    }

    /// The use after the end of an attempt that was admitted at `admitted_at`. `None` when less was
    /// reserved.
    pub fn settle(
        &self,
        admitted_at: UnixMillis,
        reserved: Consumption,
        spent: Consumption,
    ) -> Option<Self> {
        self.changed(admitted_at, |used, number| used.settle(number, reserved, spent))
    }

    fn changed(
        &self,
        at: UnixMillis,
        change: impl Fn(&PeriodUses, u32) -> Option<PeriodUses>,
    ) -> Option<Self> {
        let day = change(&self.day, BudgetPeriod::Day.number_at(at))?;
        let month = change(&self.month, BudgetPeriod::Month.number_at(at))?;
        Some(Self { day, month })
    }
}

/// The most that may be spent in a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpendingLimit {
    pub units: Microcredits,
    /// The percentage of it, 1 to 100, at which operators are told.
    pub alert_percent: Option<u8>,
}

impl SpendingLimit {
    /// Whether `spent` has reached the part at which operators are told.
    pub fn is_near(&self, spent: Microcredits) -> bool {
        let share =
            |units: Microcredits, percent: u8| u128::from(units.get()) * u128::from(percent);
        self.alert_percent.is_some_and(|percent| share(spent, 100) >= share(self.units, percent))
    }
}

/// What an account or a key may spend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budgets {
    pub day: Option<SpendingLimit>,
    pub month: Option<SpendingLimit>,
}

impl Budgets {
    pub fn of(&self, period: BudgetPeriod) -> Option<SpendingLimit> {
        match period {
            BudgetPeriod::Day => self.day,
            BudgetPeriod::Month => self.month,
        }
    }

    pub(super) fn set(&mut self, period: BudgetPeriod, limit: Option<SpendingLimit>) {
        match period {
            BudgetPeriod::Day => self.day = limit,
            BudgetPeriod::Month => self.month = limit,
        }
    }
}

/// The tokens of prompts and answers that an account's plan allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenQuotas {
    pub day: Option<u64>,
    pub month: Option<u64>,
}

impl TokenQuotas {
    pub fn of(&self, period: BudgetPeriod) -> Option<u64> {
        match period {
            BudgetPeriod::Day => self.day,
            BudgetPeriod::Month => self.month,
        }
    }
}

/// Whose spending a budget limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BudgetOwner {
    Account(AccountId),
    Key(CredentialId),
}

impl BudgetOwner {
    pub fn kind(self) -> &'static str {
        match self {
            Self::Account(_) => "account",
            Self::Key(_) => "key",
        }
    }
}

impl fmt::Display for BudgetOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Account(id) => write!(f, "account {id}"),
            Self::Key(id) => write!(f, "key {id}"),
        }
    }
}

/// A budget whose charges have just reached the part at which operators are told. Within a period
/// charges only grow, so this happens at most once in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetAlert {
    pub owner: BudgetOwner,
    pub period: BudgetPeriod,
    pub limit: SpendingLimit,
    pub spent: Microcredits,
}

/// The alerts that the change from `before` to `after` causes.
pub(super) fn alerts(
    owner: BudgetOwner,
    budgets: &Budgets,
    before: &CalendarUse,
    after: &CalendarUse,
) -> impl Iterator<Item = BudgetAlert> {
    BudgetPeriod::ALL.into_iter().filter_map(move |period| {
        let limit = budgets.of(period)?;
        let latest = |used: &PeriodUses| used.of(used.latest).spent.units;
        let [before, spent] = [before, after].map(|used| latest(used.of(period)));
        let crossed = limit.is_near(spent) && !limit.is_near(before);
        crossed.then_some(BudgetAlert { owner, period, limit, spent })
    })
}

/// Which of the limits on spending was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    PlanTokens,
    AccountBudget,
    KeyBudget,
}

impl LimitKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::PlanTokens => "plan_tokens",
            Self::AccountBudget => "account_budget",
            Self::KeyBudget => "key_budget",
        }
    }
}

/// The limit that an admission would pass: amounts in tokens for those of a plan, in microcredits
/// for budgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct LimitReached {
    pub kind: LimitKind,
    pub period: BudgetPeriod,
    pub allowed: u64,
    pub spent: u64,
    pub reserved: u64,
    pub needed: u64,
    pub renews_at: UnixMillis,
    /// Milliseconds from the refusal to the renewal.
    pub renews_in_ms: u64,
}

impl LimitReached {
    /// Whether the request could be admitted if no other one had reserved anything.
    pub fn fits_once_settled(&self) -> bool {
        self.spent.checked_add(self.needed).is_some_and(|sum| sum <= self.allowed)
    }
}

impl fmt::Display for LimitReached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { allowed, spent, reserved, needed, renews_at, .. } = self;
        let (limit, unit) = match self.kind {
            LimitKind::PlanTokens => ("quota of the account's plan", "tokens"),
            LimitKind::AccountBudget => ("account's budget", "microcredits"),
            LimitKind::KeyBudget => ("key's budget", "microcredits"),
        };
        let period = self.period.name();
        write!(
            f,
            "the {limit} is {allowed} {unit} a {period}: {spent} are spent, running requests \
             reserve {reserved}, and this one may take {needed}; it renews at {renews_at}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A time that a person can read, in milliseconds.
    fn at(time: &str) -> UnixMillis {
        let time = DateTime::parse_from_rfc3339(time).unwrap().timestamp_millis();
        UnixMillis(u64::try_from(time).unwrap())
    }

    #[test]
    fn periods_are_those_of_the_calendar() {
        let check = |time: &str, day: u32, month: u32, next: [&str; 2]| {
            let now = at(time);
            let numbers = [BudgetPeriod::Day, BudgetPeriod::Month].map(|of| of.number_at(now));
            assert_eq!(numbers, [day, month], "{time}");
            let first = BudgetPeriod::ALL.map(|of| of.first_day(of.number_at(now)).unwrap());
            let expect = [format!("{}-01", &time[..7]), time[..10].to_owned()];
            assert_eq!(first.map(|day| day.to_string()), expect);
            let renewals = [BudgetPeriod::Day, BudgetPeriod::Month].map(|of| of.renewal_after(now));
            assert_eq!(renewals, next.map(at), "{time}");
        };
        let first = ["1970-01-02T00:00:00Z", "1970-02-01T00:00:00Z"];
        check("1970-01-01T00:00:00Z", 1, 1, first);
        check("1970-01-01T23:59:59.999Z", 1, 1, first);
        let leap = ["2024-03-01T00:00:00Z", "2024-03-01T00:00:00Z"];
        check("2024-02-29T12:00:00Z", 19_783, 650, leap);
        let year = ["2027-01-01T00:00:00Z", "2027-01-01T00:00:00Z"];
        check("2026-12-31T23:59:59Z", 20_819, 684, year);
        let far = UnixMillis(u64::MAX);
        assert_eq!(BudgetPeriod::Day.number_at(far), u32::MAX);
        assert_eq!(BudgetPeriod::Month.renewal_after(far), far);
        let used =
            CalendarUse::default().reserve(Consumption::default(), at("2026-11-24T08:00:00Z"));
        assert_eq!(used.unwrap().last_day().unwrap().to_string(), "2026-11-24");
        assert_eq!(CalendarUse::default().last_day(), None);
    }

    #[test]
    fn operators_are_told_at_a_part_of_the_budget() {
        let check = |units, alert_percent, spent, near| {
            let [units, spent] = [units, spent].map(|units| Microcredits::new(units).unwrap());
            assert_eq!(SpendingLimit { units, alert_percent }.is_near(spent), near);
        };
        check(1_000, Some(80), 799, false);
        check(1_000, Some(80), 800, true);
        check(1_000, None, 5_000, false);
        check(3, Some(50), 1, false);
        check(3, Some(50), 2, true);
        check(0, Some(1), 0, true);
        check(Microcredits::MAX.get(), Some(100), Microcredits::MAX.get(), true);
    }
}

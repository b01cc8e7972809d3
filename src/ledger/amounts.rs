//! Amounts of money, and the cost of tokens. All arithmetic is on integers, and every operation is
//! checked.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::str::FromStr;

/// An amount of money: one credit is 1 000 000 microcredits. It never exceeds `Microcredits::MAX`
/// (2^53 − 1), which every JSON reader holds exactly. In JSON an amount is a string of digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Microcredits(u64);

impl Microcredits {
    pub const ZERO: Self = Self(0);
    pub const MAX: Self = Self((1 << 53) - 1);

    /// `None` above `MAX`.
    pub fn new(units: u64) -> Option<Self> {
        (units <= Self::MAX.0).then_some(Self(units))
    }

    pub fn get(self) -> u64 {
        self.0
    }

    /// `None` when the sum would pass `MAX`.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).and_then(Self::new)
    }

    /// `None` when the difference would be negative.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }
}

impl fmt::Display for Microcredits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The error for a text that is not an amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an amount is a string of digits, at most 9007199254740991")]
pub struct NotAnAmount;

impl FromStr for Microcredits {
    type Err = NotAnAmount;

    fn from_str(text: &str) -> Result<Self, NotAnAmount> {
        // `u64::from_str` would take a leading plus sign.
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = digits.then(|| text.parse().ok()).flatten();
        number.and_then(Self::new).ok_or(NotAnAmount)
    }
}

impl Serialize for Microcredits {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Microcredits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

/// Prices in microcredits per million tokens, fixed per attempt when it is admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prices {
    pub revision: u32,
    pub input: u64,
    pub cached_input: u64,
    pub output: u64,
}

impl Prices {
    /// The cost of `usage`, rounded up once to a whole microcredit. `None` when more tokens are
    /// cached than were prompted, or when the cost passes `Microcredits::MAX`.
    pub fn cost(&self, usage: &Usage) -> Option<Microcredits> {
        let fresh = usage.prompt_tokens.checked_sub(usage.cached_tokens)?;
        price(&[
            (fresh, self.input),
            (usage.cached_tokens, self.cached_input),
            (usage.completion_tokens, self.output),
        ])
    }

    /// The most that a request may cost, however many tokens of its prompt are cached.
    pub fn upper_bound(&self, prompt_tokens: u32, max_output_tokens: u32) -> Option<Microcredits> {
        let input = self.input.max(self.cached_input);
        price(&[(prompt_tokens, input), (max_output_tokens, self.output)])
    }
}

/// ⌈Σ tokens · price / 10⁶⌉, computed in 128 bits so that no product overflows.
fn price(lines: &[(u32, u64)]) -> Option<Microcredits> {
    let exact = lines.iter().try_fold(0_u128, |sum, &(tokens, price)| {
        sum.checked_add(u128::from(tokens) * u128::from(price))
    })?;
    Microcredits::new(u64::try_from(exact.div_ceil(1_000_000)).ok()?)
}

/// Tokens a request used. `cached_tokens` are the part of `prompt_tokens` served from the prefix
/// cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub completion_tokens: u32,
}

/// An amount divided over the two buckets; trial credit is always spent first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketAmounts {
    pub trial: Microcredits,
    pub premium: Microcredits,
}

impl BucketAmounts {
    pub const ZERO: Self = Self { trial: Microcredits::ZERO, premium: Microcredits::ZERO };

    /// Takes `amount` from what is available, trial first. `None` when there is not enough.
    pub fn take(amount: Microcredits, available: Self) -> Option<Self> {
        let trial = amount.min(available.trial);
        let premium = amount.checked_sub(trial)?;
        (premium <= available.premium).then_some(Self { trial, premium })
    }

    /// The sum of both parts; `None` above `Microcredits::MAX`.
    pub fn checked_total(self) -> Option<Microcredits> {
        self.trial.checked_add(self.premium)
    }

    /// The sum of both parts. Every stored amount was split from one `Microcredits`, so it fits.
    pub fn total(self) -> Microcredits {
        self.checked_total()
            .expect("invariant: the parts of an amount sum to at most Microcredits::MAX")
    }

    /// Adds part by part; `None` when either part would pass `Microcredits::MAX`.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        Some(Self {
            trial: self.trial.checked_add(other.trial)?,
            premium: self.premium.checked_add(other.premium)?,
        })
    }

    /// Subtracts part by part; `None` when either part would be negative.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        Some(Self {
            trial: self.trial.checked_sub(other.trial)?,
            premium: self.premium.checked_sub(other.premium)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units(units: u64) -> Microcredits {
        Microcredits::new(units).unwrap()
    }

    #[test]
    fn cost_rounds_up_once() {
        let check = |prices: [u64; 3], usage: [u32; 3], expect: Option<u64>| {
            let prices = Prices {
                revision: 1,
                input: prices[0],
                cached_input: prices[1],
                output: prices[2],
            };
            let usage = Usage {
                prompt_tokens: usage[0],
                cached_tokens: usage[1],
                completion_tokens: usage[2],
            };
            let cost = prices.cost(&usage);
            assert_eq!(cost.map(Microcredits::get), expect, "{prices:?} {usage:?}");
        };
        check([1, 1, 1], [1, 0, 0], Some(1));
        check([1, 1, 1], [0, 0, 0], Some(0));
        // Three thirds of a unit are one unit, not three.
        check([333_333, 333_333, 333_334], [2, 1, 1], Some(1));
        check([2_000_000, 1_000_000, 3_000_000], [10, 4, 5], Some(31));
        check([0, 0, 0], [u32::MAX, 0, u32::MAX], Some(0));
        check([1, 1, 1], [1, 2, 0], None);
        check([u64::MAX, 0, u64::MAX], [u32::MAX, 0, u32::MAX], None);
        check([Microcredits::MAX.get(), 0, 0], [1_000_000, 0, 0], Some(Microcredits::MAX.get()));
        check([Microcredits::MAX.get(), 0, 1], [1_000_000, 0, 1], None);
    }

    #[test]
    fn upper_bound_covers_a_cached_price_above_the_fresh_one() {
        let prices = Prices { revision: 1, input: 1_000_000, cached_input: 5_000_000, output: 0 };
        assert_eq!(prices.upper_bound(3, 7), Some(units(15)));
    }

    #[test]
    fn amounts_stay_inside_their_bounds() {
        assert_eq!(Microcredits::new(1 << 53), None);
        assert_eq!(Microcredits::MAX.checked_add(units(1)), None);
        assert_eq!(Microcredits::ZERO.checked_sub(units(1)), None);
        assert_eq!(units(2).checked_add(units(3)), Some(units(5)));
    }

    #[test]
    fn amounts_are_strings_in_json() {
        let check = |json: &str, expect: Option<u64>| {
            let parsed = serde_json::from_str::<Microcredits>(json).ok().map(Microcredits::get);
            assert_eq!(parsed, expect, "{json}");
        };
        check("\"0\"", Some(0));
        check("\"9007199254740991\"", Some(9_007_199_254_740_991));
        check("\"9007199254740992\"", None);
        check("\"+1\"", None);
        check("\"-1\"", None);
        check("\"\"", None);
        check("1", None);
        assert_eq!(serde_json::to_string(&units(42)).unwrap(), "\"42\"");
    }

    #[test]
    fn trial_is_spent_first() {
        let check = |amount, trial, premium, expect: Option<(u64, u64)>| {
            let available = BucketAmounts { trial: units(trial), premium: units(premium) };
            let taken = BucketAmounts::take(units(amount), available);
            let parts = taken.map(|amounts| (amounts.trial.get(), amounts.premium.get()));
            assert!(
                taken.is_none_or(|amounts| amounts.total() == units(amount)),
                "{amount} from {trial}+{premium}"
            );
            assert_eq!(parts, expect, "{amount} from {trial}+{premium}");
        };
        check(5, 10, 10, Some((5, 0)));
        check(15, 10, 10, Some((10, 5)));
        check(20, 10, 10, Some((10, 10)));
        check(21, 10, 10, None);
        check(0, 0, 0, Some((0, 0)));
    }
}

//! Checks in fixed memory whether two streams of any length and order contain the same items
//! equally often.
//!
//! Each item has a random hash, which is added to one of many sums when the item comes in one
//! stream and subtracted when it comes in the other. Where a sum is not zero at the end, a second
//! reading keeps the items of that sum, and so names those that differ.

use crate::budgets::BudgetPeriod;
use crate::records::RequestKey;
use chrono::NaiveDate;
use cresset_base::{AccountId, AttemptId};
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};

/// Number of sums, 32 KiB in all. The more there are, the fewer items a second reading has to keep
/// for each sum that is not zero.
const SUMS: u64 = 4_096;
/// Sums whose items a second reading keeps. They are about 1/64 of all items, however broken the
/// ledger is.
const MAX_SUSPECTS: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Item {
    Attempt(RequestKey, AttemptId),
    Adjustment(AccountId, String),
    /// A microcredit that an account spent in the period of this number.
    Spent(AccountId, BudgetPeriod, u32),
    /// A token that an account used in the period of this number.
    Used(AccountId, BudgetPeriod, u32),
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attempt(key, attempt) => write!(f, "attempt {attempt} of {key}"),
            Self::Adjustment(account, reference) => {
                write!(f, "grant or debit {reference:?} of account {account}")
            }
            Self::Spent(account, period, number) | Self::Used(account, period, number) => {
                let what = if matches!(self, Self::Spent(..)) { "spent" } else { "used tokens" };
                let first_day = period.first_day(*number).unwrap_or(NaiveDate::MAX);
                write!(f, "account {account} has {what} in the {} of {first_day}", period.name())
            }
        }
    }
}

pub(super) struct MultisetCheck {
    hasher: RandomState,
    sums: Vec<u64>,
    suspects: Vec<usize>,
    kept: HashMap<Item, i128>,
}

impl Default for MultisetCheck {
    fn default() -> Self {
        Self {
            hasher: RandomState::new(),
            sums: vec![0; SUMS as usize],
            suspects: Vec::new(),
            kept: HashMap::new(),
        }
    }
}

impl MultisetCheck {
    /// Counts an item of the journal.
    pub(super) fn journalled(&mut self, item: Item) {
        self.add(item, 1);
    }

    /// Counts an item of the rows.
    pub(super) fn stored(&mut self, item: Item) {
        self.add(item, -1);
    }

    /// Counts an item of the journal `times` over; a negative number counts it among the rows.
    pub(super) fn add(&mut self, item: Item, times: i128) {
        let hash = self.hasher.hash_one(&item);
        let place = (hash % SUMS) as usize;
        // An odd factor, so that no number of times of one item makes 0.
        self.sums[place] = self.sums[place].wrapping_add((hash | 1).wrapping_mul(times as u64));
        if self.suspects.contains(&place) {
            *self.kept.entry(item).or_default() += times;
        }
    }

    /// The check for a second reading; `None` when both streams had the same items.
    pub(super) fn second_reading(self) -> Option<Self> {
        let unequal = self.sums.iter().enumerate().filter(|(_, sum)| **sum != 0);
        let suspects: Vec<usize> = unequal.map(|(place, _)| place).take(MAX_SUSPECTS).collect();
        let again = Self { hasher: self.hasher, suspects, ..Self::default() };
        (!again.suspects.is_empty()).then_some(again)
    }

    /// Items that are not equally often in both, with how many more the journal has.
    pub(super) fn surpluses(self) -> impl Iterator<Item = (Item, i128)> {
        self.kept.into_iter().filter(|(_, surplus)| *surplus != 0)
    }
}

//! Whether two streams of items, of any length and in any order, have the same items equally often,
//! in fixed memory.
//!
//! Each item adds a random hash of itself to one of many sums when one stream has it and subtracts
//! it when the other does. Where a sum is not zero at the end, a second reading keeps the items of
//! that sum, which names the culprits.

use crate::ids::{AccountId, AttemptId};
use crate::ledger::records::RequestKey;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

const SUMS: u64 = 4_096;
/// Sums whose items a second reading keeps: a small part of all items, however broken the
/// ledger is.
const MAX_SUSPECTS: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Item {
    Attempt(RequestKey, AttemptId),
    Grant(AccountId, String),
}

pub(super) struct MultisetCheck {
    hasher: RandomState,
    sums: Vec<u64>,
    suspects: Vec<usize>,
    kept: HashMap<Item, i64>,
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
    /// The journal has the item.
    pub fn journalled(&mut self, item: Item) {
        self.count(item, 1);
    }

    /// The rows have the item.
    pub fn stored(&mut self, item: Item) {
        self.count(item, -1);
    }

    fn count(&mut self, item: Item, times: i64) {
        let hash = self.hasher.hash_one(&item);
        let place = (hash % SUMS) as usize;
        self.sums[place] = self.sums[place].wrapping_add(hash.wrapping_mul(times as u64));
        if self.suspects.contains(&place) {
            *self.kept.entry(item).or_default() += times;
        }
    }

    /// For a second reading; `None` when everything was paired.
    pub fn second_reading(self) -> Option<Self> {
        let unequal = self.sums.iter().enumerate().filter(|(_, sum)| **sum != 0);
        let suspects: Vec<usize> = unequal.map(|(place, _)| place).take(MAX_SUSPECTS).collect();
        let again = Self { hasher: self.hasher, suspects, ..Self::default() };
        (!again.suspects.is_empty()).then_some(again)
    }

    /// What is not equally often in both, with how much oftener the journal has it.
    pub fn surpluses(self) -> impl Iterator<Item = (Item, i64)> {
        self.kept.into_iter().filter(|(_, surplus)| *surplus != 0)
    }
}

//! Whose prompt is computed next: deficit round-robin between accounts, first come first served inside one
//! (Shreedhar and Varghese, 1995, in the variant where a turn may overdraw and the next ones pay it back).
//!
//! Every token an account is given, prompt or decode, is charged. An account whose balance is not positive is passed over and
//! earns a quantum; so the rounds go on until somebody can be served, and no budget is left unused.

use super::sequence::SequenceId;
use crate::ids::AccountId;
use std::collections::{BTreeSet, HashMap, VecDeque};

/// Tokens an account earns each time its turn passes.
const QUANTUM: i64 = 128;

#[derive(Debug, Default)]
struct Lane {
    /// Running sequences with more prompt to compute.
    partial: BTreeSet<SequenceId>,
    waiting: BTreeSet<SequenceId>,
    /// Tokens the account may be given; negative when it had more than its share.
    deficit: i64,
}

impl Lane {
    fn first(&self, admitting: bool) -> Option<SequenceId> {
        let waiting = self.waiting.first().filter(|_| admitting);
        self.partial.first().or(waiting).copied()
    }

    fn remove(&mut self, id: SequenceId) {
        self.partial.remove(&id);
        self.waiting.remove(&id);
    }
}

#[derive(Debug)]
pub struct FairQueue {
    lanes: HashMap<AccountId, Lane>,
    turns: VecDeque<AccountId>,
    /// Largest debt: what one step can give.
    floor: i64,
}

impl FairQueue {
    pub fn new(max_batched_tokens: usize) -> Self {
        Self { lanes: HashMap::new(), turns: VecDeque::new(), floor: -(max_batched_tokens as i64) }
    }

    pub fn push_waiting(&mut self, account: AccountId, id: SequenceId) {
        self.lane(account).waiting.insert(id);
    }

    pub fn push_partial(&mut self, account: AccountId, id: SequenceId) {
        self.lane(account).partial.insert(id);
    }

    /// Takes out the next sequence to be given tokens; `admitting` says whether waiting ones may start.
    pub fn pop(&mut self, admitting: bool) -> Option<SequenceId> {
        if !self.lanes.values().any(|lane| lane.first(admitting).is_some()) {
            return None;
        }
        loop {
            let account = *self.turns.front()?;
            let lane = self.lanes.get_mut(&account)?;
            match lane.first(admitting) {
                Some(id) if lane.deficit > 0 => {
                    lane.remove(id);
                    return Some(id);
                }
                Some(_) => lane.deficit += QUANTUM,
                None => {}
            }
            self.turns.rotate_left(1);
        }
    }

    pub fn charge(&mut self, account: AccountId, tokens: usize) {
        let floor = self.floor;
        let lane = self.lane(account);
        lane.deficit = (lane.deficit - tokens as i64).max(floor);
    }

    /// Forgets a sequence, and with an account's last one (`alone`) the account's balance.
    pub fn remove(&mut self, account: AccountId, id: SequenceId, alone: bool) {
        if alone {
            self.lanes.remove(&account);
            self.turns.retain(|turn| *turn != account);
        } else {
            self.lane(account).remove(id);
        }
    }

    pub fn contains(&self, account: AccountId, id: SequenceId) -> bool {
        self.lanes.get(&account).is_some_and(|lane| lane.partial.contains(&id) || lane.waiting.contains(&id))
    }

    fn lane(&mut self, account: AccountId) -> &mut Lane {
        self.lanes.entry(account).or_insert_with(|| {
            self.turns.push_back(account);
            Lane::default()
        })
    }
}

#[cfg(test)]
mod tests;

//! Whose prompt is computed next: the account of the highest rank; among equals deficit
//! round-robin, and first come first served inside one account (Shreedhar and Varghese, 1995, in
//! the variant where a turn may overdraw and the next ones pay it back).
//!
//! Every token an account is given, prompt or decode, is charged. An account whose balance is not
//! positive is passed over and earns a quantum; so the rounds go on until somebody can be served,
//! and no budget is left unused. A rank is the account's priority and rises by one with every
//! `AGEING` steps in which it is given nothing, so nobody starves.

use super::sequence::SequenceId;
use crate::ids::AccountId;
use std::collections::{BTreeSet, HashMap, VecDeque};

/// Tokens an account earns each time its turn passes.
const QUANTUM: i64 = 128;
/// Steps without a token that are worth one priority.
const AGEING: u64 = 64;

#[derive(Debug, Default)]
struct Lane {
    /// Running sequences with more prompt to compute.
    partial: BTreeSet<SequenceId>,
    waiting: BTreeSet<SequenceId>,
    /// Tokens the account may be given; negative when it had more than its share.
    deficit: i64,
    priority: u8,
    /// The step in which it was given something, or came.
    served: u64,
}

impl Lane {
    fn first(&self, admitting: bool) -> Option<SequenceId> {
        let waiting = self.waiting.first().filter(|_| admitting);
        self.partial.first().or(waiting).copied()
    }

    fn rank(&self, now: u64) -> u64 {
        u64::from(self.priority) + (now - self.served) / AGEING
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
    /// Number of the step.
    now: u64,
}

impl FairQueue {
    pub fn new(max_batched_tokens: usize) -> Self {
        Self {
            lanes: HashMap::new(),
            turns: VecDeque::new(),
            floor: -(max_batched_tokens as i64),
            now: 0,
        }
    }

    /// A step begins.
    pub fn tick(&mut self) {
        self.now += 1;
    }

    /// The latest `priority` of an account is that of all its sequences.
    pub fn push_waiting(&mut self, account: AccountId, id: SequenceId, priority: u8) {
        let lane = self.lane(account);
        lane.priority = priority;
        lane.waiting.insert(id);
    }

    pub fn push_partial(&mut self, account: AccountId, id: SequenceId) {
        self.lane(account).partial.insert(id);
    }

    /// Takes out the next sequence to be given tokens; `admitting` says whether waiting ones may
    /// start.
    pub fn pop(&mut self, admitting: bool) -> Option<SequenceId> {
        let now = self.now;
        let ready = self.lanes.values().filter(|lane| lane.first(admitting).is_some());
        let highest = ready.map(|lane| lane.rank(now)).max()?;
        loop {
            let account = *self.turns.front()?;
            let lane = self.lanes.get_mut(&account)?;
            match lane.first(admitting).filter(|_| lane.rank(now) == highest) {
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
        let (floor, now) = (self.floor, self.now);
        let lane = self.lane(account);
        lane.served = now;
        lane.deficit = (lane.deficit - tokens as i64).max(floor);
    }

    /// 0 for an account without sequences.
    pub fn rank(&self, account: AccountId) -> u64 {
        self.lanes.get(&account).map_or(0, |lane| lane.rank(self.now))
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
        self.lanes
            .get(&account)
            .is_some_and(|lane| lane.partial.contains(&id) || lane.waiting.contains(&id))
    }

    fn lane(&mut self, account: AccountId) -> &mut Lane {
        let now = self.now;
        self.lanes.entry(account).or_insert_with(|| {
            self.turns.push_back(account);
            Lane { served: now, ..Lane::default() }
        })
    }
}

#[cfg(test)]
mod tests;

//! Chooses whose prompt is computed next: the account of the highest rank; among equal ranks by
//! deficit round-robin, and first come first served inside one account (Shreedhar and Varghese,
//! 1995, in the variant in which a turn may overdraw and later ones pay it back). Pure.
//!
//! Every token that an account is given, of a prompt or a decode, is charged to its balance. An
//! account whose balance is not positive is passed over and earns a quantum, so the rounds go on
//! until an account can be served, and no budget is left unused. A rank is the account's priority
//! and rises by one with every `STEPS_PER_RANK` steps in which the account is given nothing, so no
//! account starves.

use super::sequence::SequenceId;
use cresset_base::AccountId;
use std::collections::{BTreeSet, HashMap, VecDeque};

/// Tokens an account earns each time its turn passes. It is small beside a step's token budget, so
/// that several accounts get a turn within one step.
const QUANTUM: i64 = 128;
/// Steps without a token that raise an account's rank by one: at 20 ms a step, a priority is worth
/// a little more than a second of waiting.
const STEPS_PER_RANK: u64 = 64;

#[derive(Debug, Default)]
struct AccountQueue {
    /// Running sequences with more prompt to compute.
    partial: BTreeSet<SequenceId>,
    waiting: BTreeSet<SequenceId>,
    /// Live sequences of the account, including those that are not queued because they decode.
    live: usize,
    /// Tokens the account may be given; negative when it had more than its share.
    balance: i64,
    priority: u8,
    /// The number of the last step in which the account was given something, or of the step in
    /// which it was added.
    served: u64,
}

impl AccountQueue {
    fn first(&self, may_start: bool) -> Option<SequenceId> {
        let waiting = self.waiting.first().filter(|_| may_start);
        self.partial.first().or(waiting).copied()
    }

    fn rank(&self, now: u64) -> u64 {
        u64::from(self.priority) + (now - self.served) / STEPS_PER_RANK
    }

    fn remove(&mut self, id: SequenceId) {
        self.partial.remove(&id);
        self.waiting.remove(&id);
    }
}

#[derive(Debug)]
pub(crate) struct FairQueue {
    accounts: HashMap<AccountId, AccountQueue>,
    /// The accounts in the order of their turns.
    turns: VecDeque<AccountId>,
    /// Lowest balance: minus the tokens of one step, so that a debt is never larger than what one
    /// step can give.
    lowest_balance: i64,
    /// The number of the step that is being scheduled.
    now: u64,
}

impl FairQueue {
    pub(crate) fn new(max_batched_tokens: usize) -> Self {
        Self {
            accounts: HashMap::new(),
            turns: VecDeque::new(),
            lowest_balance: -(max_batched_tokens as i64),
            now: 0,
        }
    }

    /// Counts a step. Ranks rise with the steps.
    pub(crate) fn begin_step(&mut self) {
        self.now += 1;
    }

    /// Queues a new sequence, to be forgotten with `forget` when it ends.
    pub(crate) fn add(&mut self, account: AccountId, id: SequenceId, priority: u8) {
        self.push_waiting(account, id, priority);
        self.queue_of(account).live += 1;
    }

    /// Queues a live sequence that holds no blocks. The latest `priority` of an account is that of
    /// all its sequences.
    pub(crate) fn push_waiting(&mut self, account: AccountId, id: SequenceId, priority: u8) {
        let queue = self.queue_of(account);
        queue.priority = priority;
        queue.waiting.insert(id);
    }

    /// Queues a running sequence with more prompt to compute.
    pub(crate) fn push_partial(&mut self, account: AccountId, id: SequenceId) {
        self.queue_of(account).partial.insert(id);
    }

    /// Takes out the next sequence to be given tokens; `may_start` says whether it may be one that
    /// waits.
    pub(crate) fn pop(&mut self, may_start: bool) -> Option<SequenceId> {
        let now = self.now;
        let ready = self.accounts.values().filter(|queue| queue.first(may_start).is_some());
        let highest = ready.map(|queue| queue.rank(now)).max()?;
        loop {
            let account = *self.turns.front()?;
            let queue = self.accounts.get_mut(&account)?;
            match queue.first(may_start).filter(|_| queue.rank(now) == highest) {
                Some(id) if queue.balance > 0 => {
                    queue.remove(id);
                    return Some(id);
                }
                Some(_) => queue.balance += QUANTUM,
                None => {}
            }
            self.turns.rotate_left(1);
        }
    }

    /// Takes tokens that the account was given off its balance.
    pub(crate) fn charge(&mut self, account: AccountId, tokens: usize) {
        let (lowest, now) = (self.lowest_balance, self.now);
        let queue = self.queue_of(account);
        queue.served = now;
        queue.balance = (queue.balance - tokens as i64).max(lowest);
    }

    /// 0 for an account without sequences.
    pub(crate) fn rank(&self, account: AccountId) -> u64 {
        self.accounts.get(&account).map_or(0, |queue| queue.rank(self.now))
    }

    /// Takes a sequence out of the queue. It stays live.
    pub(crate) fn remove(&mut self, account: AccountId, id: SequenceId) {
        self.queue_of(account).remove(id);
    }

    /// Forgets a sequence that has ended, and with an account's last one the account's balance.
    pub(crate) fn forget(&mut self, account: AccountId, id: SequenceId) {
        let queue = self.queue_of(account);
        queue.remove(id);
        queue.live -= 1;
        if queue.live == 0 {
            self.accounts.remove(&account);
            self.turns.retain(|turn| *turn != account);
        }
    }

    pub(crate) fn contains(&self, account: AccountId, id: SequenceId) -> bool {
        self.accounts
            .get(&account)
            .is_some_and(|queue| queue.partial.contains(&id) || queue.waiting.contains(&id))
    }

    fn queue_of(&mut self, account: AccountId) -> &mut AccountQueue {
        let now = self.now;
        self.accounts.entry(account).or_insert_with(|| {
            self.turns.push_back(account);
            AccountQueue { served: now, ..AccountQueue::default() }
        })
    }
}

#[cfg(test)]
mod tests;

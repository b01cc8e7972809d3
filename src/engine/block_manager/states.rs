//! The states of sequences whose model has recurrent layers, and which of them are kept. Pure.
//!
//! A state is what recurrent layers carry from token to token. It is read whole and written whole,
//! so a sequence can only go on from one, and a prefix is a hit only where one was kept. Each row
//! of a step reads a slot and writes one: a state is kept simply by not writing over it.
//!
//! A sequence holds one slot, and a second while a row goes on from a state that stays. So half as
//! many sequences as there are slots can always run, and what they do not hold keeps states, the
//! least recently used of which goes first. Each draft of a row takes one more for the time of its
//! step, because the sequence goes on from the state after the last draft that was right.

use super::pool::BlockPool;
use super::{BlockOwner, IntegrityError, ensure};
use cresset_models::cache_kinds::NO_STATE;

/// A slot that a sequence holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HeldState {
    slot: u32,
    /// The number of tokens that the state covers.
    tokens: usize,
    /// Whether it must stay as it is.
    stays: bool,
}

/// The slots of one sequence, those with fewer tokens first. The last is that of its latest row;
/// one before it is held until the row that reads it was computed.
#[derive(Debug, Default)]
pub(super) struct StateTable {
    held: Vec<HeldState>,
    /// The slots that the latest row reads and writes, and then those of each of its drafts.
    latest: Vec<StateMove>,
    /// Where its prefix would have gone on if a state had been kept there.
    wanted: Option<usize>,
    /// The tokens that the latest kept state of its answer covers.
    of_answer: Option<usize>,
}

/// The state that a row goes on from (`NO_STATE`: it begins), and where its own goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateMove {
    pub read: u32,
    pub write: u32,
}

impl StateTable {
    pub(super) fn latest(&self) -> &[StateMove] {
        &self.latest
    }

    /// Begins with a state that stays (its slot, and the tokens that it covers), or without one.
    /// `wanted` is the number of tokens from which it would have gone on if a state had been kept
    /// there.
    pub(super) fn begin(&mut self, state: Option<(u32, usize)>, wanted: Option<usize>) {
        assert!(self.held.is_empty(), "a sequence that begins holds no state");
        let stays = |(slot, tokens)| HeldState { slot, tokens, stays: true };
        self.held.extend(state.map(stays));
        self.wanted = wanted;
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = u32> {
        self.held.iter().map(|state| state.slot)
    }

    /// Takes the slots of a row that ends at `to` tokens. Its state stays if it is one to keep.
    pub(super) fn advance(
        &mut self,
        pool: &mut BlockPool,
        owner: BlockOwner,
        to: usize,
        stays: bool,
    ) {
        let read = self.held.last().map_or(NO_STATE, |state| state.slot);
        let write = match self.held.last() {
            // If there are two states, the last belongs to a row that was not computed yet: no
            // other sequence has found it, so it can be written over even if it was to stay.
            Some(state) if !state.stays || self.held.len() > 1 => state.slot,
            _ => pool.take(owner),
        };
        if write == read {
            pool.assert_writable(write, owner);
            self.held.pop();
        }
        self.held.push(HeldState { slot: write, tokens: to, stays });
        self.latest = vec![StateMove { read, write }];
    }

    /// Takes a slot for the state after each of the latest row's drafts, which end at `to` tokens.
    /// `stays` says of a number of tokens whether the state after them is one to keep.
    pub(super) fn branch(
        &mut self,
        pool: &mut BlockPool,
        owner: BlockOwner,
        to: usize,
        stays: impl Fn(usize) -> bool,
    ) {
        let HeldState { slot: mut read, tokens, .. } =
            *self.held.last().expect("a row was claimed");
        for tokens in tokens + 1..=to {
            let write = pool.take(owner);
            self.held.push(HeldState { slot: write, tokens, stays: stays(tokens) });
            self.latest.push(StateMove { read, write });
            read = write;
        }
    }

    /// Gives back the states after drafts that were wrong: all but the first `tokens` are.
    pub(super) fn settle(&mut self, pool: &mut BlockPool, owner: BlockOwner, tokens: usize) {
        for state in self.held.extract_if(.., |state| state.tokens > tokens) {
            pool.release(state.slot, owner);
        }
        self.latest.truncate(1);
    }

    /// The slots of states that stay and cover at most the first `tokens`, and what each covers.
    pub(super) fn kept(&self, tokens: usize) -> Vec<(u32, usize)> {
        let kept = self.held.iter().filter(|state| state.stays && state.tokens <= tokens);
        kept.map(|state| (state.slot, state.tokens)).collect()
    }

    /// Gives back the states that no row reads any more, once the first `tokens` are computed.
    pub(super) fn give_back(&mut self, pool: &mut BlockPool, owner: BlockOwner, tokens: usize) {
        while self.held.len() > 1 && self.held[0].tokens < tokens {
            pool.release(self.held.remove(0).slot, owner);
        }
    }

    /// Notes that a state of the answer, which covers `tokens`, is kept. Returns what the state
    /// covers whose place it takes.
    pub(super) fn keep_of_answer(&mut self, tokens: usize) -> Option<usize> {
        self.of_answer.replace(tokens).filter(|before| *before < tokens)
    }

    pub(super) fn release(&mut self, pool: &mut BlockPool, owner: BlockOwner) {
        for state in self.held.drain(..) {
            pool.release(state.slot, owner);
        }
        self.latest.clear();
    }

    /// The number of tokens, greater than `from`, at which the next state is kept: `first` and its
    /// doublings, where the sequence's prefix would have gone on, and the end of its prompt, from
    /// which the next prompt of a conversation goes on. Both are in whole blocks.
    pub(super) fn next_kept(&self, from: usize, first: usize, prompt_end: usize) -> Option<usize> {
        let doubled = (0..usize::BITS).map(|i| first << i).find(|at| *at > from);
        let at = [doubled, Some(prompt_end), self.wanted];
        at.into_iter().flatten().filter(|at| *at > from && *at >= first).min()
    }
}

/// Checks that every slot is accounted for exactly once, and that no sequence holds more than two
/// beside those of its drafts.
pub(super) fn check<'a>(
    pool: &BlockPool,
    tables: impl Iterator<Item = (&'a StateTable, BlockOwner)>,
) -> Result<(), IntegrityError> {
    let mut held = Vec::new();
    for (table, owner) in tables {
        held.extend(table.slots().map(|slot| (slot, owner)));
        let most = 1 + table.latest.len().max(1);
        ensure(table.held.len() <= most, || format!("a sequence holds {:?}", table.held))?;
    }
    pool.check(held.into_iter()).map_err(|error| IntegrityError(format!("states: {}", error.0)))
}

//! Hands out blocks of the cache, and slots for states: it counts references, finds prefixes again,
//! and evicts. Pure.
//!
//! A sequence has one list of blocks for each group of layers. Layers that attend to everything
//! keep all of them; layers with a window give those behind it back. Full blocks are found again by
//! a chain of hashes: each covers the block's tokens and the hash before it, and the chain starts
//! from a per-boot secret and the owner, so neither another account nor another application of the
//! same account can reach a block or learn that it exists. A block's tokens are compared on every
//! hit, so a hash collision is a miss. Handing one owner's block to another would leak a prompt, so
//! the assertions here stay on in release builds.

mod pool;
mod states;

use cresset_base::{AccountId, ApplicationId};
use cresset_models::cache_kinds::{CacheKinds, NO_BLOCK, first_kept};
use pool::{BlockContent, BlockPool};
use sha2::{Digest, Sha256};
pub(crate) use states::StateMove;
use states::StateTable;

/// The first 128 bits of SHA-256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct BlockHash([u8; 16]);

/// Whose tokens blocks hold: an application connection's, or those of the account's own keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockOwner {
    pub account: AccountId,
    pub application: Option<ApplicationId>,
}

/// The blocks of one sequence, in order. Blocks are appended at the end, given back from behind a
/// window, or released all at once.
#[derive(Debug)]
pub struct BlockTable {
    owner: BlockOwner,
    /// Tokens of the sequence's prompt.
    prompt: usize,
    /// For each group of layers the blocks, all equally many; `NO_BLOCK` behind its window.
    groups: Vec<Vec<u32>>,
    /// Hashes of the sequence's leading full blocks, as far as they were needed. They depend on its
    /// tokens alone, so they stay valid over a preemption.
    chain: Vec<BlockHash>,
    /// How many leading blocks are in the cache, or have their content there in another block.
    registered: usize,
    states: StateTable,
}

impl BlockTable {
    /// The empty table of a sequence. `prompt` is the number of tokens of its prompt.
    pub fn new(owner: BlockOwner, prompt: usize) -> Self {
        let (groups, chain, states) = (Vec::new(), Vec::new(), StateTable::default());
        Self { owner, prompt, groups, chain, registered: 0, states }
    }

    /// The blocks in each group of layers.
    pub fn groups(&self) -> &[Vec<u32>] {
        &self.groups
    }

    /// Number of blocks in each group, those behind its window included.
    pub fn len(&self) -> usize {
        self.groups.first().map_or(0, Vec::len)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The states of the row that was claimed last and of its drafts, in models with recurrent
    /// layers.
    pub fn state_moves(&self) -> &[StateMove] {
        self.states.latest()
    }

    fn held(&self) -> impl Iterator<Item = (u32, BlockOwner)> {
        held(&self.groups).map(|id| (id, self.owner))
    }
}

/// The blocks of some groups that were not given back.
fn held(groups: &[Vec<u32>]) -> impl Iterator<Item = u32> {
    groups.iter().flatten().copied().filter(|id| *id != NO_BLOCK)
}

/// Cached blocks that hold the beginning of a sequence. None of them is claimed yet.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Prefix {
    /// As in a [`BlockTable`]; no groups if nothing was found.
    pub groups: Vec<Vec<u32>>,
    /// How many of them are in no table: adopting these lowers `available`.
    pub evictable: usize,
    /// The slot of the state that goes on from there, if layers are recurrent.
    pub state: Option<u32>,
    /// The tokens that the other layers have, if no state goes on from there.
    pub wanted: Option<usize>,
}

/// The accounting of blocks contradicts itself. The engine must not run another step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV block accounting is broken: {0}; restart the node")]
pub struct IntegrityError(pub String);

#[derive(Debug)]
pub struct BlockManager {
    block_size: usize,
    kinds: CacheKinds,
    /// For each group the most blocks that one sequence holds at a time.
    most_held: Vec<usize>,
    pool: BlockPool,
    /// The slots of states, which are found by the same hashes.
    states: BlockPool,
    secret: [u8; 32],
}

impl BlockManager {
    /// All blocks are free at first. `in_flight` is the largest number of one sequence's tokens
    /// that are scheduled and not committed. `secret` is drawn once per boot: it makes hashes
    /// unpredictable from outside.
    pub fn new(
        num_blocks: usize,
        block_size: usize,
        kinds: CacheKinds,
        in_flight: usize,
        secret: [u8; 32],
    ) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        let most_held = kinds.most_held(block_size, in_flight);
        let (pool, states) = (BlockPool::new(num_blocks), BlockPool::new(kinds.states));
        Self { block_size, kinds, most_held, pool, states, secret }
    }

    pub fn total(&self) -> usize {
        self.pool.blocks.len()
    }

    /// Number of blocks that can be handed out without taking one from a running sequence.
    pub fn available(&self) -> usize {
        self.pool.available()
    }

    pub fn used(&self) -> usize {
        self.total() - self.available()
    }

    pub fn groups(&self) -> usize {
        self.kinds.windows.len()
    }

    /// Whether the model has recurrent layers.
    pub fn has_states(&self) -> bool {
        self.kinds.states > 0
    }

    /// Number of blocks that `tokens` take in each group of layers.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Number of blocks that a sequence with these blocks still has to get until `tokens` are
    /// computed. Groups with a window get some of them from behind the window.
    pub fn missing(&self, groups: &[Vec<u32>], tokens: usize) -> usize {
        let missing = |(group, most): (usize, &usize)| {
            let blocks = groups.get(group).map_or(&[][..], Vec::as_slice);
            let held = blocks.iter().rev().take_while(|id| **id != NO_BLOCK).count();
            self.blocks_for(tokens).saturating_sub(blocks.len()).min(most.saturating_sub(held))
        };
        self.most_held.iter().enumerate().map(missing).sum()
    }

    /// The longest cached prefix of `tokens` that all groups of layers have, in whole blocks. The
    /// last token is never part of it: it must be run to give logits.
    pub fn lookup(&self, table: &mut BlockTable, tokens: &[u32]) -> Prefix {
        let full_blocks = tokens.len().saturating_sub(1) / self.block_size;
        let mut found: Vec<Vec<u32>> = vec![Vec::new(); self.groups()];
        // For each group how many blocks before the current one follow each other without a gap.
        let mut runs = vec![0; self.groups()];
        let (mut longest, mut reached, mut state) = (0, 0, None);
        for index in 0..full_blocks {
            for (group, (blocks, run)) in found.iter_mut().zip(&mut runs).enumerate() {
                let content = self.content(table, group, index, tokens);
                let hit = self.pool.find(&content, table.owner);
                *run = hit.map_or(0, |_| *run + 1);
                blocks.push(hit.unwrap_or(NO_BLOCK));
            }
            let kept = |window: &Option<usize>| index + 1 - self.first_kept(*window, index + 1);
            if self.kinds.windows.iter().zip(&runs).all(|(window, run)| *run >= kept(window)) {
                reached = index + 1;
                let content = self.content(table, 0, index, tokens);
                let found = self.states.find(&content, table.owner);
                if found.is_some() || !self.has_states() {
                    (longest, state) = (reached, found);
                }
            }
            // What a layer without a window lacks, no later block can replace.
            if self.kinds.windows.iter().zip(&runs).any(|(w, run)| w.is_none() && *run == 0) {
                break;
            }
        }
        let wanted = (reached > longest).then_some(reached * self.block_size);
        Prefix { state, wanted, ..self.cut(found, longest) }
    }

    /// How many tokens a lookup finds.
    pub fn found(&self, table: &mut BlockTable, tokens: &[u32]) -> usize {
        self.lookup(table, tokens).groups.first().map_or(0, Vec::len) * self.block_size
    }

    /// The first `len` blocks of each group, without those behind its window.
    fn cut(&self, mut groups: Vec<Vec<u32>>, len: usize) -> Prefix {
        if len == 0 {
            return Prefix::default();
        }
        for (blocks, window) in groups.iter_mut().zip(&self.kinds.windows) {
            blocks.truncate(len);
            blocks[..self.first_kept(*window, len)].fill(NO_BLOCK);
        }
        let evictable = held(&groups).filter(|id| !self.pool.is_held(*id)).count();
        Prefix { groups, evictable, ..Prefix::default() }
    }

    /// Makes `prefix` the beginning of an empty table. Returns how many tokens it holds.
    pub fn adopt(&mut self, table: &mut BlockTable, prefix: Prefix) -> usize {
        assert!(table.is_empty(), "block tables are append-only");
        for id in held(&prefix.groups) {
            self.pool.hold(id, table.owner);
        }
        table.groups = prefix.groups;
        table.registered = table.len();
        let tokens = table.len() * self.block_size;
        if let Some(slot) = prefix.state {
            self.states.hold(slot, table.owner);
        }
        table.states.begin(prefix.state.map(|slot| (slot, tokens)), prefix.wanted);
        tokens
    }

    /// Makes room for the tokens `from..to` of a sequence. False, and nothing changes, when too few
    /// blocks are available. Afterwards their blocks belong to this table alone and may be written.
    pub fn claim(&mut self, table: &mut BlockTable, from: usize, to: usize) -> bool {
        let claimed = self.claim_blocks(table, from, to);
        if claimed && self.has_states() && to > from {
            let stays = self.kept_from(table, from)(to);
            table.states.advance(&mut self.states, table.owner, to, stays);
        }
        claimed
    }

    /// Makes room for the drafts `from..to` behind the row that was claimed last, as `claim` does.
    /// They must be no more than `states_for_drafts`.
    pub fn claim_drafts(&mut self, table: &mut BlockTable, from: usize, to: usize) -> bool {
        let claimed = self.claim_blocks(table, from, to);
        if claimed && self.has_states() {
            let stays = self.kept_from(table, from);
            table.states.branch(&mut self.states, table.owner, to, stays);
        }
        claimed
    }

    fn claim_blocks(&mut self, table: &mut BlockTable, from: usize, to: usize) -> bool {
        let missing = self.blocks_for(to).saturating_sub(table.len());
        if missing * self.groups() > self.available() {
            return false;
        }
        table.groups.resize_with(self.groups(), Vec::new);
        for blocks in &mut table.groups {
            blocks.extend((0..missing).map(|_| self.pool.take(table.owner)));
            for &block in &blocks[from / self.block_size..to.div_ceil(self.block_size)] {
                self.pool.assert_writable(block, table.owner);
            }
        }
        true
    }

    /// The most drafts of a step that may have a state. They take a quarter of all slots at most,
    /// so that most of them keep states for later prompts.
    pub fn states_for_drafts(&self) -> usize {
        let most = self.kinds.states / 4;
        if self.has_states() { most.min(self.states.available()) } else { usize::MAX }
    }

    /// How many of the `count` tokens after the first `from` a row may have: a state is kept where
    /// a row ends.
    pub fn row_within(&self, table: &BlockTable, from: usize, count: usize) -> usize {
        let kept = self.next_kept(table, from).filter(|_| self.has_states());
        kept.map_or(count, |at| count.min(at - from))
    }

    /// Says of a number of tokens whether the state after them is kept, for a row that begins at
    /// `from`. Beside those at which rows end for it, these are the states after whole blocks of
    /// the answer: the next turn of a conversation goes on from the last of them.
    fn kept_from(&self, table: &BlockTable, from: usize) -> impl Fn(usize) -> bool + use<> {
        let (next, block) = (self.next_kept(table, from), self.block_size);
        let answer = self.first_state().max(table.prompt);
        move |to| next == Some(to) || (to >= answer && to.is_multiple_of(block))
    }

    /// The fewest tokens that a kept state covers.
    fn first_state(&self) -> usize {
        self.kinds.first_kept.max(1).next_multiple_of(self.block_size)
    }

    /// Where a row of the sequence has to end after `from` tokens, because its state is kept there.
    fn next_kept(&self, table: &BlockTable, from: usize) -> Option<usize> {
        // The last token of a prompt is never part of a prefix.
        let prompt_end = table.prompt.saturating_sub(1) / self.block_size * self.block_size;
        table.states.next_kept(from, self.first_state(), prompt_end)
    }

    /// Offers the full blocks among the computed `tokens` to later sequences of its owner, and
    /// gives back those that no later token of this one sees.
    pub fn commit(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        for index in table.registered..tokens.len() / self.block_size {
            for group in 0..table.groups.len() {
                let content = self.content(table, group, index, tokens);
                self.pool.offer(table.groups[group][index], content);
            }
            table.registered = index + 1;
        }
        self.commit_states(table, tokens);
        for (blocks, window) in table.groups.iter_mut().zip(&self.kinds.windows) {
            let behind = first_kept(*window, tokens.len(), self.block_size);
            let held = blocks[..behind].iter().rposition(|id| *id == NO_BLOCK).map_or(0, |i| i + 1);
            for block in &mut blocks[held..behind] {
                self.pool.release(std::mem::replace(block, NO_BLOCK), table.owner);
            }
        }
    }

    /// Offers the states that stay among those of the computed `tokens`. Of an answer's states the
    /// latest alone stays, so that long answers push no other conversation's out.
    fn commit_states(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        let kept = table.states.kept(tokens.len());
        for &(slot, covered) in &kept {
            let content = self.content(table, 0, covered / self.block_size - 1, tokens);
            self.states.offer(slot, content);
        }
        table.states.give_back(&mut self.states, table.owner, tokens.len());
        for (_, covered) in kept.into_iter().filter(|(_, covered)| *covered >= table.prompt) {
            if let Some(before) = table.states.keep_of_answer(covered) {
                let hash = table.chain[before / self.block_size - 1];
                self.states.forget_unheld(&(0, hash));
            }
        }
    }

    /// Commits `tokens` after a row with drafts, the last of which were right; its other drafts
    /// were wrong, and their states are given back.
    pub fn settle_drafts(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        table.states.settle(&mut self.states, table.owner, tokens.len());
        self.commit(table, tokens);
    }

    /// Empties a table. Its cached blocks become evictable, the sequence's last ones first, because
    /// a prefix is of no use without its beginning.
    pub fn release(&mut self, table: &mut BlockTable) {
        let groups = std::mem::take(&mut table.groups);
        for index in (0..groups.first().map_or(0, Vec::len)).rev() {
            for id in groups.iter().map(|blocks| blocks[index]).filter(|id| *id != NO_BLOCK) {
                self.pool.release(id, table.owner);
            }
        }
        table.registered = 0;
        table.states.release(&mut self.states, table.owner);
    }

    /// Empties a table whose content cannot be trusted: blocks and states that no other table holds
    /// leave the cache as well.
    pub fn discard(&mut self, table: &mut BlockTable) {
        for id in held(&table.groups) {
            self.pool.forget_if_private(id);
        }
        for slot in table.states.slots() {
            self.states.forget_if_private(slot);
        }
        // The sequence left states behind that it does not hold any more.
        for hash in &table.chain {
            self.states.forget_unheld(&(0, *hash));
        }
        self.release(table);
    }

    /// Checks that every block is accounted for exactly once and that none is shared between
    /// owners. `tables` must hold every table that exists.
    pub fn check_integrity<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable> + Clone,
    ) -> Result<(), IntegrityError> {
        self.pool.check(tables.clone().flat_map(BlockTable::held))?;
        states::check(&self.states, tables.map(|table| (&table.states, table.owner)))
    }

    /// The number of leading blocks that no token behind the first `blocks` sees.
    fn first_kept(&self, window: Option<usize>, blocks: usize) -> usize {
        first_kept(window, blocks * self.block_size, self.block_size)
    }

    /// The content of the `index`-th block of `tokens` in a group of layers.
    fn content(
        &self,
        table: &mut BlockTable,
        group: usize,
        index: usize,
        tokens: &[u32],
    ) -> BlockContent {
        let hash = self.hash_of(table, index, tokens);
        let parent = self.parent(table, index);
        BlockContent { key: (group, hash), parent, tokens: self.tokens_of(index, tokens).into() }
    }

    fn tokens_of<'a>(&self, index: usize, tokens: &'a [u32]) -> &'a [u32] {
        &tokens[index * self.block_size..(index + 1) * self.block_size]
    }

    fn hash_of(&self, table: &mut BlockTable, index: usize, tokens: &[u32]) -> BlockHash {
        for next in table.chain.len()..=index {
            let parent = self.parent(table, next);
            table.chain.push(chained(parent, self.tokens_of(next, tokens)));
        }
        table.chain[index]
    }

    /// The hash before the `index`-th block; the chain must reach that far.
    fn parent(&self, table: &BlockTable, index: usize) -> BlockHash {
        if let Some(before) = index.checked_sub(1) {
            return table.chain[before];
        }
        let BlockOwner { account, application } = table.owner;
        let mut hasher = Sha256::new_with_prefix(self.secret);
        hasher.update(account.0.as_bytes());
        // No application has the nil id.
        hasher.update(application.map_or([0; 16], |application| application.0.into_bytes()));
        truncated(hasher)
    }
}

fn chained(parent: BlockHash, tokens: &[u32]) -> BlockHash {
    let mut hasher = Sha256::new().chain_update(parent.0);
    for token in tokens {
        hasher.update(token.to_le_bytes());
    }
    truncated(hasher)
}

fn truncated(hasher: Sha256) -> BlockHash {
    let mut hash = BlockHash([0; 16]);
    hash.0.copy_from_slice(&hasher.finalize()[..16]);
    hash
}

fn ensure(holds: bool, detail: impl FnOnce() -> String) -> Result<(), IntegrityError> {
    if holds { Ok(()) } else { Err(IntegrityError(detail())) }
}

#[cfg(test)]
mod tests;

//! Hands out KV blocks: it counts references, finds prefixes again, and evicts. Pure.
//!
//! A block is in exactly one place: *free* (no content), *evictable* (content of an earlier
//! sequence that no table holds) or *used* (in at least one block table). Full blocks are found
//! again by a chain of hashes: each covers the block's tokens and the hash before it, and the chain
//! starts from a per-boot secret and the owner, so neither another account nor another application
//! of the same account can reach a block or learn that it exists. A block's tokens are compared on
//! every hit, so a hash collision is a miss. Handing one owner's block to another would leak a
//! prompt, so the assertions here stay on in release builds.

use crate::ids::{AccountId, ApplicationId};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};

/// The first 128 bits of SHA-256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct BlockHash([u8; 16]);

/// Whose tokens blocks hold: an application connection's, or those of the account's own keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockOwner {
    pub account: AccountId,
    pub application: Option<ApplicationId>,
}

/// The blocks of one sequence, in order. Blocks are only ever appended, or released all at once.
#[derive(Debug)]
pub struct BlockTable {
    owner: BlockOwner,
    blocks: Vec<u32>,
    /// Hashes of the sequence's leading full blocks, as far as they were needed. They depend on its
    /// tokens alone, so they stay valid over a preemption.
    chain: Vec<BlockHash>,
    /// How many leading blocks are in the cache, or have their content there in another block.
    registered: usize,
}

impl BlockTable {
    pub fn new(owner: BlockOwner) -> Self {
        Self { owner, blocks: Vec::new(), chain: Vec::new(), registered: 0 }
    }

    pub fn blocks(&self) -> &[u32] {
        &self.blocks
    }
}

/// Cached blocks that hold the beginning of a sequence. None of them is claimed yet.
#[derive(Debug, PartialEq, Eq)]
pub struct Prefix {
    pub blocks: Vec<u32>,
    /// How many of them are in no table: adopting these lowers `available`.
    pub evictable: usize,
}

/// The accounting of blocks contradicts itself. The engine must not run another step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KV block accounting is broken: {0}; restart the node")]
pub struct IntegrityError(pub String);

#[derive(Debug, Default)]
struct KvBlock {
    /// Tables that hold the block.
    ref_count: u32,
    /// Whose tokens the block holds or will hold; `None` when free.
    owner: Option<BlockOwner>,
    content: Option<BlockContent>,
    /// Number of the release that freed it from the last table: the key in `evictable`.
    released: u64,
}

#[derive(Debug)]
struct BlockContent {
    hash: BlockHash,
    parent: BlockHash,
    tokens: Box<[u32]>,
}

#[derive(Debug)]
pub struct BlockManager {
    block_size: usize,
    blocks: Vec<KvBlock>,
    free: Vec<u32>,
    /// Least recently released first.
    evictable: BTreeMap<u64, u32>,
    cached: HashMap<BlockHash, u32>,
    releases: u64,
    secret: [u8; 32],
}

impl BlockManager {
    /// All blocks are free at first. `secret` is drawn once per boot: it makes hashes unpredictable
    /// from outside.
    pub fn new(num_blocks: usize, block_size: usize, secret: [u8; 32]) -> Self {
        assert!(block_size > 0, "a block holds at least one token");
        Self {
            block_size,
            blocks: (0..num_blocks).map(|_| KvBlock::default()).collect(),
            free: (0..num_blocks as u32).rev().collect(),
            evictable: BTreeMap::new(),
            cached: HashMap::new(),
            releases: 0,
            secret,
        }
    }

    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Number of blocks that can be handed out without taking one from a running sequence.
    pub fn available(&self) -> usize {
        self.free.len() + self.evictable.len()
    }

    pub fn used(&self) -> usize {
        self.total() - self.available()
    }

    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// The longest cached prefix of `tokens` in whole blocks. The last token is never part of it:
    /// it must be run to give logits.
    pub fn lookup(&self, table: &mut BlockTable, tokens: &[u32]) -> Prefix {
        let full_blocks = tokens.len().saturating_sub(1) / self.block_size;
        let mut prefix = Prefix { blocks: Vec::new(), evictable: 0 };
        for index in 0..full_blocks {
            let Some(block) = self.hit(table, index, tokens) else {
                break;
            };
            prefix.evictable += usize::from(self.block(block).ref_count == 0);
            prefix.blocks.push(block);
        }
        prefix
    }

    /// Makes `prefix` the beginning of an empty table. Returns how many tokens it holds.
    pub fn adopt(&mut self, table: &mut BlockTable, prefix: Prefix) -> usize {
        assert!(table.blocks.is_empty(), "block tables are append-only");
        for &id in &prefix.blocks {
            let block = &mut self.blocks[id as usize];
            assert_eq!(block.owner, Some(table.owner), "block of another owner");
            if block.ref_count == 0 {
                self.evictable.remove(&block.released);
            }
            block.ref_count += 1;
        }
        table.registered = prefix.blocks.len();
        table.blocks = prefix.blocks;
        table.blocks.len() * self.block_size
    }

    /// Makes room for the tokens `from..to` of a sequence. False, and nothing changes, when too few
    /// blocks are available. Afterwards their blocks belong to this table alone and may be written.
    pub fn claim(&mut self, table: &mut BlockTable, from: usize, to: usize) -> bool {
        let missing = self.blocks_for(to).saturating_sub(table.blocks.len());
        if missing > self.available() {
            return false;
        }
        for _ in 0..missing {
            let block = self.take(table.owner);
            table.blocks.push(block);
        }
        for &block in &table.blocks[from / self.block_size..self.blocks_for(to)] {
            self.assert_writable(block, table.owner);
        }
        true
    }

    /// Offers the full blocks among the computed `tokens` to later sequences of its owner.
    pub fn register(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        for index in table.registered..tokens.len() / self.block_size {
            let hash = self.hash_of(table, index, tokens);
            let id = table.blocks[index];
            // Two sequences may compute the same block in one step: the one that came first stays
            // in the cache.
            if let std::collections::hash_map::Entry::Vacant(entry) = self.cached.entry(hash) {
                entry.insert(id);
                self.blocks[id as usize].content = Some(BlockContent {
                    hash,
                    parent: self.parent(table, index),
                    tokens: self.tokens_of(index, tokens).into(),
                });
            }
            table.registered = index + 1;
        }
    }

    /// Empties a table. Its cached blocks become evictable, the sequence's last one first, because
    /// a prefix is of no use without its beginning.
    pub fn release(&mut self, table: &mut BlockTable) {
        for id in std::mem::take(&mut table.blocks).into_iter().rev() {
            self.release_block(id, table.owner);
        }
        table.registered = 0;
    }

    /// Empties a table whose content cannot be trusted: blocks that no other table holds leave the
    /// cache as well.
    pub fn discard(&mut self, table: &mut BlockTable) {
        for &id in &table.blocks {
            if self.block(id).ref_count == 1 {
                self.forget(id);
            }
        }
        self.release(table);
    }

    /// Checks that every block is accounted for exactly once and that none is shared between
    /// owners. `tables` must hold every table that exists.
    pub fn check_integrity<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable>,
    ) -> Result<(), IntegrityError> {
        self.check_references(tables)?;
        self.check_places()?;
        self.check_cache()
    }

    fn check_references<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable>,
    ) -> Result<(), IntegrityError> {
        let mut references = vec![0; self.total()];
        for table in tables {
            for &id in &table.blocks {
                references[id as usize] += 1;
                let owner = self.block(id).owner;
                ensure(owner == Some(table.owner), || {
                    format!("block {id} of {owner:?} is in a table of {:?}", table.owner)
                })?;
            }
        }
        for (id, (block, found)) in self.blocks.iter().zip(references).enumerate() {
            ensure(block.ref_count == found, || {
                let counted = block.ref_count;
                format!("block {id} counts {counted} references and has {found}")
            })?;
        }
        Ok(())
    }

    fn check_places(&self) -> Result<(), IntegrityError> {
        let mut places: Vec<u32> =
            self.blocks.iter().map(|block| u32::from(block.ref_count > 0)).collect();
        for &id in &self.free {
            places[id as usize] += 1;
            let block = self.block(id);
            ensure(block.content.is_none() && block.owner.is_none(), || {
                format!("free block {id} has content")
            })?;
        }
        for (&released, &id) in &self.evictable {
            places[id as usize] += 1;
            let block = self.block(id);
            ensure(block.content.is_some() && block.released == released, || {
                format!("evictable block {id} is out of place")
            })?;
        }
        match places.iter().position(|&count| count != 1) {
            Some(id) => Err(IntegrityError(format!("block {id} is in {} places", places[id]))),
            None => Ok(()),
        }
    }

    fn check_cache(&self) -> Result<(), IntegrityError> {
        let with_content = self.blocks.iter().filter(|block| block.content.is_some());
        ensure(with_content.count() == self.cached.len(), || {
            "the cache lists another number of blocks than have content".into()
        })?;
        for (hash, &id) in &self.cached {
            let content = self.block(id).content.as_ref();
            ensure(content.is_some_and(|content| content.hash == *hash), || {
                format!("block {id} does not hold what the cache says")
            })?;
        }
        Ok(())
    }

    fn block(&self, id: u32) -> &KvBlock {
        &self.blocks[id as usize]
    }

    /// Takes a block without content: a free one, or else the least recently released evictable
    /// one.
    fn take(&mut self, owner: BlockOwner) -> u32 {
        let id = self.free.pop().unwrap_or_else(|| {
            let (_, id) =
                self.evictable.pop_first().expect("invariant: the caller checked `available`");
            self.forget(id);
            id
        });
        let block = &mut self.blocks[id as usize];
        assert!(block.ref_count == 0 && block.content.is_none(), "block {id} handed out twice");
        block.ref_count = 1;
        block.owner = Some(owner);
        id
    }

    fn assert_writable(&self, id: u32, owner: BlockOwner) {
        let block = self.block(id);
        assert!(
            block.ref_count == 1 && block.content.is_none() && block.owner == Some(owner),
            "block {id} would be written while shared"
        );
    }

    fn release_block(&mut self, id: u32, owner: BlockOwner) {
        let block = &mut self.blocks[id as usize];
        assert!(
            block.ref_count > 0 && block.owner == Some(owner),
            "block {id} released by a table that does not hold it"
        );
        block.ref_count -= 1;
        if block.ref_count > 0 {
            return;
        }
        if block.content.is_some() {
            self.releases += 1;
            block.released = self.releases;
            self.evictable.insert(self.releases, id);
        } else {
            block.owner = None;
            self.free.push(id);
        }
    }

    fn forget(&mut self, id: u32) {
        if let Some(content) = self.blocks[id as usize].content.take() {
            self.cached.remove(&content.hash);
        }
    }

    /// The cached block that holds the `index`-th block of `tokens`, compared field by field.
    fn hit(&self, table: &mut BlockTable, index: usize, tokens: &[u32]) -> Option<u32> {
        let hash = self.hash_of(table, index, tokens);
        let id = *self.cached.get(&hash)?;
        let block = self.block(id);
        let content = block.content.as_ref()?;
        let same = block.owner == Some(table.owner)
            && content.parent == self.parent(table, index)
            && *content.tokens == *self.tokens_of(index, tokens);
        same.then_some(id)
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

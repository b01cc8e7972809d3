//! A number of blocks, and which of them hold what. Pure.
//!
//! A block is in exactly one place: *free* (no content), *evictable* (content of an earlier
//! sequence that no table holds) or *used* (in at least one table).

use super::{BlockHash, BlockOwner, IntegrityError, ensure};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

/// Under which a block's content is found: the group of layers, and the hash of all tokens up to
/// the block's end.
pub(super) type ContentKey = (usize, BlockHash);

/// What the content of a block was computed from. All of it is compared on a hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BlockContent {
    pub key: ContentKey,
    pub parent: BlockHash,
    pub tokens: Box<[u32]>,
}

#[derive(Debug, Default)]
pub(super) struct PooledBlock {
    /// Tables that hold the block.
    pub ref_count: u32,
    /// Whose tokens the block holds or will hold; `None` when free.
    pub owner: Option<BlockOwner>,
    pub content: Option<BlockContent>,
    /// Number of the release that freed it from the last table: the key in `evictable`.
    pub released: u64,
}

#[derive(Debug)]
pub(super) struct BlockPool {
    pub blocks: Vec<PooledBlock>,
    pub free: Vec<u32>,
    /// Least recently released first.
    pub evictable: BTreeMap<u64, u32>,
    pub cached: HashMap<ContentKey, u32>,
    releases: u64,
}

impl BlockPool {
    /// All blocks are free at first.
    pub(super) fn new(num_blocks: usize) -> Self {
        Self {
            blocks: (0..num_blocks).map(|_| PooledBlock::default()).collect(),
            free: (0..num_blocks as u32).rev().collect(),
            evictable: BTreeMap::new(),
            cached: HashMap::new(),
            releases: 0,
        }
    }

    /// Number of blocks that can be handed out without taking one from a running sequence.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.evictable.len()
    }

    pub(super) fn is_held(&self, id: u32) -> bool {
        self.block(id).ref_count > 0
    }

    /// Whether one table alone holds the block, and no later one can find its content.
    pub(super) fn is_private(&self, id: u32) -> bool {
        self.block(id).ref_count == 1 && self.block(id).content.is_none()
    }

    /// Takes a block without content: a free one, or else the least recently released evictable
    /// one.
    pub(super) fn take(&mut self, owner: BlockOwner) -> u32 {
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

    /// Adds a table to those that hold a block.
    pub(super) fn hold(&mut self, id: u32, owner: BlockOwner) {
        let block = &mut self.blocks[id as usize];
        assert_eq!(block.owner, Some(owner), "block of another owner");
        if block.ref_count == 0 {
            self.evictable.remove(&block.released);
        }
        block.ref_count += 1;
    }

    pub(super) fn release(&mut self, id: u32, owner: BlockOwner) {
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

    pub(super) fn assert_writable(&self, id: u32, owner: BlockOwner) {
        assert!(
            self.is_private(id) && self.block(id).owner == Some(owner),
            "block {id} would be written while shared"
        );
    }

    /// Makes a block's content known. Of two blocks with the same content, the one that came first
    /// stays in the cache.
    pub(super) fn offer(&mut self, id: u32, content: BlockContent) {
        if let Entry::Vacant(entry) = self.cached.entry(content.key) {
            entry.insert(id);
            self.blocks[id as usize].content = Some(content);
        }
    }

    /// The block that holds `content`.
    pub(super) fn find(&self, content: &BlockContent, owner: BlockOwner) -> Option<u32> {
        let id = *self.cached.get(&content.key)?;
        let block = self.block(id);
        (block.owner == Some(owner) && block.content.as_ref() == Some(content)).then_some(id)
    }

    /// Removes a block's content from the cache, unless another table holds the block too.
    pub(super) fn forget_if_private(&mut self, id: u32) {
        if self.block(id).ref_count == 1 {
            self.forget(id);
        }
    }

    /// Removes content that no table holds from the cache.
    pub(super) fn forget_unheld(&mut self, key: &ContentKey) {
        let Some(&id) = self.cached.get(key) else { return };
        let &PooledBlock { ref_count, released, .. } = self.block(id);
        if ref_count > 0 {
            return;
        }
        self.evictable.remove(&released);
        self.forget(id);
        self.blocks[id as usize].owner = None;
        self.free.push(id);
    }

    fn forget(&mut self, id: u32) {
        if let Some(content) = self.blocks[id as usize].content.take() {
            self.cached.remove(&content.key);
        }
    }

    fn block(&self, id: u32) -> &PooledBlock {
        &self.blocks[id as usize]
    }

    /// Checks that every block is accounted for exactly once and that none is shared between
    /// owners. `held` is each block of each table that exists, with the table's owner.
    pub(super) fn check(
        &self,
        held: impl Iterator<Item = (u32, BlockOwner)>,
    ) -> Result<(), IntegrityError> {
        let mut references = vec![0; self.blocks.len()];
        for (id, holder) in held {
            references[id as usize] += 1;
            let owner = self.block(id).owner;
            ensure(owner == Some(holder), || {
                format!("block {id} of {owner:?} is in a table of {holder:?}")
            })?;
        }
        for (id, (block, found)) in self.blocks.iter().zip(references).enumerate() {
            ensure(block.ref_count == found, || {
                let counted = block.ref_count;
                format!("block {id} counts {counted} references and has {found}")
            })?;
        }
        self.check_places()?;
        self.check_cache()
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
        for (key, &id) in &self.cached {
            let content = self.block(id).content.as_ref();
            ensure(content.is_some_and(|content| content.key == *key), || {
                format!("block {id} does not hold what the cache says")
            })?;
        }
        Ok(())
    }
}

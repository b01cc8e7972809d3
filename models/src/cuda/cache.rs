//! Paged keys, values and tokens on a device, states of sequences, and how many of each its memory
//! holds.

use crate::cache_kinds::CacheLayout;
use crate::{Error, KvCache, ModelConfig, ModelOptions, Result};
use cresset_kernels::DeviceOps;
use cresset_kernels::gpu::{Buffer, Kind, Rank};

/// The cache of a model, and the tokens beside their K and V.
pub(super) struct DeviceCache {
    pub kv: KvCache<DeviceOps>,
    /// u32: the token in each slot of the first group of layers.
    pub tokens: Buffer,
}

impl DeviceCache {
    pub(super) fn new(
        gpu: &DeviceOps,
        config: &ModelConfig,
        sizes: CacheSizes,
        options: &ModelOptions,
    ) -> Result<Self> {
        let (CacheSizes { blocks, states }, block_size) = (sizes, options.block_size);
        let mut layout = CacheLayout::on_device(config);
        layout.kinds.states = states;
        layout.kinds.first_kept = options.state_tokens;
        let slots = blocks * layout.parts[0] * block_size;
        let mut kv = KvCache::new(gpu, config, layout, blocks, block_size)?;
        kv.layout.kinds.states = states.saturating_sub(1);
        Ok(Self { tokens: Buffer::new(gpu, Kind::U32, slots)?, kv })
    }

    /// The block that padding rows write to and read, in each group of layers.
    pub(super) fn dummy_blocks(&self) -> Vec<u32> {
        let last = self.kv.num_blocks - 1;
        let of_group = |parts: &usize| last * parts..(last + 1) * parts;
        self.kv.layout.parts.iter().flat_map(of_group).map(|block| block as u32).collect()
    }
}

/// How many blocks and states a cache has. The last of each is that of padding rows, which nobody
/// else reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CacheSizes {
    pub blocks: usize,
    /// 0 in models without recurrent layers.
    pub states: usize,
}

impl CacheSizes {
    /// Room for padding alone.
    pub(super) fn padding(config: &ModelConfig) -> Self {
        Self { blocks: 1, states: usize::from(config.recurrent.is_some()) }
    }

    pub(super) fn bytes(self, config: &ModelConfig, block_size: usize) -> usize {
        self.blocks * block_bytes(config, block_size) + self.states * config.state_bytes()
    }
}

/// More states than this would keep prefixes that nobody asks for again.
const MOST_STATES: usize = 1 << 16;

/// Bytes of one block: K and V of a group of layers, and its tokens.
pub(crate) fn block_bytes(config: &ModelConfig, block_size: usize) -> usize {
    let layout = CacheLayout::on_device(config);
    let tokens = Kind::U32.bytes() * layout.parts[0] * block_size;
    layout.block_bytes(config, block_size) + tokens
}

/// Bytes that a sequence of `tokens` takes at most, if `in_flight` of them are being computed.
pub(crate) fn context_bytes(
    config: &ModelConfig,
    tokens: usize,
    block_size: usize,
    in_flight: usize,
) -> usize {
    let kinds = CacheLayout::on_device(config).kinds;
    kinds.blocks_for(tokens, block_size, in_flight) * block_bytes(config, block_size)
}

/// What a block costs, and how many there may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockCost {
    pub bytes: usize,
    pub tokens: usize,
    /// One for each group of layers, and one for padding.
    pub least: usize,
    /// Slots are numbered in 32 bits.
    pub most: usize,
}

impl BlockCost {
    fn of(config: &ModelConfig, block_size: usize) -> Self {
        let layout = CacheLayout::on_device(config);
        let parts = layout.parts.iter().copied().max().unwrap_or(1);
        Self {
            bytes: block_bytes(config, block_size),
            tokens: block_size,
            least: layout.kinds.windows.len() + 1,
            most: u32::MAX as usize / (block_size * parts),
        }
    }
}

/// The memory of a device that a model may take, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    pub total: usize,
    pub free: usize,
    /// Memory that this model has taken so far.
    pub own: usize,
    /// The part of the total that this model may take, 0 to 1.
    pub share: f64,
    /// Memory that stays free.
    pub reserve: usize,
    /// The most that the cache may take, if that is limited.
    pub most: Option<usize>,
    /// The part of the cache that holds states, 0 to 1.
    pub state_share: f64,
}

impl Budget {
    /// Returns how many blocks and states fit: at least one block for each group of layers and two
    /// states beside those of padding rows, since a sequence that runs may take two.
    pub(super) fn sizes(&self, config: &ModelConfig, block_size: usize) -> Result<CacheSizes> {
        let states = self.states(config.state_bytes())?;
        let taken = states * config.state_bytes();
        let blocks = self.blocks(BlockCost::of(config, block_size), taken)?;
        Ok(CacheSizes { blocks, states })
    }

    /// The memory that the cache may take.
    fn left(&self) -> usize {
        let left =
            self.allowed().saturating_sub(self.own).min(self.free.saturating_sub(self.reserve));
        left.min(self.most.unwrap_or(usize::MAX))
    }

    fn allowed(&self) -> usize {
        (self.total as f64 * self.share) as usize
    }

    fn states(&self, bytes: usize) -> Result<usize> {
        let most = (self.left() as f64 * self.state_share) as usize;
        match most.checked_div(bytes) {
            None => Ok(0),
            Some(0..=2) => Err(Error::OutOfMemory(format!(
                "states of sequences may take {most} bytes, {} of the cache on the GPU, but three \
                 are needed of {bytes} bytes each; allow more for the cache or for them",
                self.state_share
            ))),
            Some(states) => Ok(states.min(MOST_STATES)),
        }
    }

    /// `taken`: bytes that states take.
    pub(super) fn blocks(&self, block: BlockCost, taken: usize) -> Result<usize> {
        let (allowed, left) = (self.allowed(), self.left() - taken);
        let BlockCost { bytes, tokens, least, most } = block;
        let blocks = (left / bytes).min(most);
        if blocks >= least {
            return Ok(blocks);
        }
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        Err(Error::OutOfMemory(format!(
            "the model may take {} of the GPU's {} MiB, of which {} are free now and {} stay free; its weights and workspace \
             take {} MiB, which leaves no room for the KV cache ({least} blocks of {tokens} tokens take {} MiB): allow a larger \
             share, a larger cache or a smaller reserve, fewer tokens or rows in a step, or stop what else uses this GPU",
            mib(allowed),
            mib(self.total),
            mib(self.free),
            mib(self.reserve),
            mib(self.own),
            mib(least * bytes)
        )))
    }
}

/// The fewest blocks that fit on any rank, of which `blocks` fit on this one.
pub(super) fn fewest(gpu: &DeviceOps, blocks: usize) -> Result<usize> {
    let rank = gpu.rank();
    if rank == Rank::ALONE {
        return Ok(blocks);
    }
    // Slots are numbered in 32 bits, so blocks are too.
    let own = Buffer::from_slice(gpu, &[blocks as u32])?;
    let all = Buffer::new(gpu, Kind::U32, rank.count)?;
    gpu.all_gather(own.view(), all.view())?;
    let fits = all.to_vec::<u32>()?.into_iter().min();
    Ok(fits.map_or(blocks, |fewest| fewest as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(bytes: usize) -> BlockCost {
        BlockCost { bytes, tokens: 16, least: 2, most: 1 << 26 }
    }

    #[test]
    fn the_cache_takes_what_is_left_of_the_share() {
        let budget = |own, free| Budget {
            total: 1000 << 20,
            free,
            own,
            share: 0.5,
            reserve: 20 << 20,
            most: None,
            state_share: 0.25,
        };
        let check = |budget: Budget, expect: Option<usize>| match (
            budget.blocks(block(1 << 20), 0),
            expect,
        ) {
            (Ok(found), Some(expect)) => assert_eq!(found, expect, "{budget:?}"),
            (Err(error), None) => {
                assert!(
                    error.to_string().contains("may take 500 of the GPU's 1000 MiB"),
                    "{error}"
                );
            }
            (found, _) => panic!("{budget:?}: {found:?}"),
        };
        check(budget(100 << 20, 900 << 20), Some(400));
        check(budget(100 << 20, 30 << 20), Some(10));
        check(budget(100 << 20, 22 << 20), Some(2));
        check(budget(100 << 20, 21 << 20), None);
        check(budget(100 << 20, 0), None);
        let limited = |most| Budget { most: Some(most), ..budget(100 << 20, 900 << 20) };
        check(limited(7 << 20), Some(7));
        check(limited(1 << 20), None);
        check(budget(498 << 20, 500 << 20), Some(2));
        check(budget(499 << 20, 500 << 20), None);
        check(budget(700 << 20, 300 << 20), None);
        let huge = Budget { total: 1 << 45, free: 1 << 45, share: 1.0, ..budget(0, 0) };
        assert_eq!(huge.blocks(block(1 << 10), 0).unwrap(), 1 << 26);
    }

    #[test]
    fn states_take_their_share_of_the_cache() {
        let budget = |free| Budget {
            total: 1000 << 20,
            free,
            own: 0,
            share: 1.0,
            reserve: 0,
            most: None,
            state_share: 0.25,
        };
        assert_eq!(budget(100 << 20).states(0).unwrap(), 0);
        assert_eq!(budget(100 << 20).states(1 << 20).unwrap(), 25);
        assert_eq!(budget(100 << 20).states(1).unwrap(), MOST_STATES);
        assert_eq!(budget(100 << 20).blocks(block(1 << 20), 25 << 20).unwrap(), 75);
        assert_eq!(budget(12 << 20).states(1 << 20).unwrap(), 3);
        let error = budget(11 << 20).states(1 << 20).unwrap_err().to_string();
        assert!(error.contains("three are needed of 1048576 bytes"), "{error}");
    }
}

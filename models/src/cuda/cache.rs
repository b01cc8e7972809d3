//! Paged keys, values and tokens on a device, and how many blocks its memory holds.

use crate::cache_kinds::CacheLayout;
use crate::{Error, KvCache, ModelConfig, Result};
use cresset_kernels::DeviceOps;
use cresset_kernels::gpu::{Buffer, Kind};

/// The cache of a model, and the tokens beside their K and V.
pub(super) struct DeviceCache {
    pub kv: KvCache<DeviceOps>,
    /// `[num_blocks, block_size]` u32: the token in each slot.
    pub tokens: Buffer,
}

impl DeviceCache {
    pub(super) fn new(
        gpu: &DeviceOps,
        config: &ModelConfig,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self> {
        Ok(Self {
            tokens: Buffer::new(gpu, Kind::U32, num_blocks * block_size)?,
            kv: KvCache::new(
                gpu,
                config,
                CacheLayout::of_one_group(config),
                num_blocks,
                block_size,
            )?,
        })
    }
}

/// Bytes of one block: K and V over all layers, and its tokens.
pub(super) fn block_bytes(config: &ModelConfig, block_size: usize) -> usize {
    let layout = CacheLayout::of_one_group(config);
    layout.block_bytes(config, block_size) + Kind::U32.bytes() * block_size
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
}

impl Budget {
    /// Returns how many blocks fit: at least one beside the one that padding rows write to.
    pub(super) fn blocks(&self, block_bytes: usize, block_size: usize) -> Result<usize> {
        let allowed = (self.total as f64 * self.share) as usize;
        let left = allowed.saturating_sub(self.own).min(self.free.saturating_sub(self.reserve));
        let left = left.min(self.most.unwrap_or(usize::MAX));
        // Slots are numbered in 32 bits.
        let blocks = (left / block_bytes).min(u32::MAX as usize / block_size);
        if blocks >= 2 {
            return Ok(blocks);
        }
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        Err(Error::OutOfMemory(format!(
            "the model may take {} of the GPU's {} MiB, of which {} are free now and {} stay free; its weights and workspace \
             take {} MiB, which leaves no room for the KV cache (two blocks of {block_size} tokens take {} MiB): allow a larger \
             share, a larger cache or a smaller reserve, fewer tokens or rows in a step, or stop what else uses this GPU",
            mib(allowed),
            mib(self.total),
            mib(self.free),
            mib(self.reserve),
            mib(self.own),
            mib(2 * block_bytes)
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_takes_what_is_left_of_the_share() {
        let budget = |own, free| Budget {
            total: 1000 << 20,
            free,
            own,
            share: 0.5,
            reserve: 20 << 20,
            most: None,
        };
        let check =
            |budget: Budget, expect: Option<usize>| match (budget.blocks(1 << 20, 16), expect) {
                (Ok(found), Some(expect)) => assert_eq!(found, expect, "{budget:?}"),
                (Err(error), None) => assert!(
                    error.to_string().contains("may take 500 of the GPU's 1000 MiB"),
                    "{error}"
                ),
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
        assert_eq!(huge.blocks(1 << 10, 64).unwrap(), (1 << 26) - 1);
    }
}

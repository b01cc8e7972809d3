//! Paged key and value storage of all layers.

use crate::{ModelConfig, Result};
use cresset_kernels::OpMemory;

/// K and V of every layer, in the layout that the ops of `M` read
/// ([`RopeArgs`](cresset_kernels::rope::RopeArgs)).
pub struct KvCache<M: OpMemory> {
    pub block_size: usize,
    pub num_blocks: usize,
    /// Per layer: `num_blocks * block_size * kv_heads * head_dim` values.
    pub k: Vec<M::Buffer>,
    pub v: Vec<M::Buffer>,
}

impl<M: OpMemory> KvCache<M> {
    pub(crate) fn new(
        ops: &M,
        config: &ModelConfig,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self> {
        let len = num_blocks * block_size * config.kv_heads * config.head_dim;
        let layer = |_| Ok(ops.allocate(config.kv_kind, len)?);
        let layers = || (0..config.layers).map(layer).collect::<Result<_>>();
        Ok(Self { block_size, num_blocks, k: layers()?, v: layers()? })
    }
}

//! Paged key and value storage of all layers.

use crate::cache_kinds::{CacheLayout, LayerPlace};
use crate::{ModelConfig, Result};
use cresset_kernels::OpMemory;

/// K and V of every layer, in the layout that the ops of `M` read
/// ([`RopeArgs`](cresset_kernels::rope::RopeArgs)).
pub struct KvCache<M: OpMemory> {
    pub block_size: usize,
    pub num_blocks: usize,
    pub(crate) layout: CacheLayout,
    /// For each layer of a group: `num_blocks * block_size * kv_heads * head_dim` values.
    pub k: Vec<M::Buffer>,
    pub v: Vec<M::Buffer>,
}

/// The place of one layer's K and V in the cache.
pub struct LayerCache<'a, M: OpMemory> {
    /// The number of the layer's group.
    pub group: usize,
    pub k: M::View<'a>,
    pub v: M::View<'a>,
}

impl<M: OpMemory> KvCache<M> {
    pub(crate) fn new(
        ops: &M,
        config: &ModelConfig,
        layout: CacheLayout,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self> {
        let len = num_blocks * block_size * config.kv_heads * config.head_dim;
        let layer = |_| Ok(ops.allocate(config.kv_kind, len)?);
        let layers = || (0..layout.layers_per_block).map(layer).collect::<Result<_>>();
        Ok(Self { block_size, num_blocks, k: layers()?, v: layers()?, layout })
    }

    /// The part of a layer of the model.
    pub fn of_layer(&self, layer: usize) -> LayerCache<'_, M> {
        let LayerPlace { group, index } = self.layout.places[layer];
        LayerCache { group, k: M::view(&self.k[index]), v: M::view(&self.v[index]) }
    }
}

//! Paged key and value storage of all layers.

use candle_core::DType;
use cresset_kernels::{Compute, OpMemory};

/// The storage that a model needs per cached token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// f32 or f16.
    pub dtype: DType,
}

impl KvLayout {
    /// Bytes of one block over all layers, K and V.
    pub fn block_bytes(&self, block_size: usize) -> usize {
        self.layers * self.kv_heads * self.head_dim * block_size * 2 * self.dtype.size_in_bytes()
    }
}

/// K and V of every layer, in the layout that the ops of `M` read
/// ([`RopeArgs`](cresset_kernels::rope::RopeArgs)).
pub struct KvCache<M: OpMemory = Compute> {
    pub block_size: usize,
    pub num_blocks: usize,
    /// Per layer: `num_blocks * block_size * kv_heads * head_dim` values.
    pub k: Vec<M::Buffer>,
    pub v: Vec<M::Buffer>,
}

impl<M: OpMemory> KvCache<M> {
    /// Makes a cache with buffers from `allocate`, which takes the number of values.
    pub(crate) fn with<E>(
        layout: &KvLayout,
        num_blocks: usize,
        block_size: usize,
        allocate: impl Fn(usize) -> Result<M::Buffer, E>,
    ) -> Result<Self, E> {
        let len = num_blocks * block_size * layout.kv_heads * layout.head_dim;
        let layers = || (0..layout.layers).map(|_| allocate(len)).collect::<Result<_, E>>();
        Ok(Self { block_size, num_blocks, k: layers()?, v: layers()? })
    }
}

//! Paged key and value storage of all layers.

use crate::Result;
use candle_core::{DType, Device, Tensor};

/// What a model needs per cached token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl KvLayout {
    /// Bytes of one block over all layers, K and V, in f32.
    pub fn block_bytes(&self, block_size: usize) -> usize {
        self.layers * self.kv_heads * self.head_dim * block_size * 2 * DType::F32.size_in_bytes()
    }
}

pub struct KvCache {
    pub block_size: usize,
    pub num_blocks: usize,
    /// Per layer: `[num_blocks, block_size, kv_heads, head_dim]` f32.
    pub k: Vec<Tensor>,
    pub v: Vec<Tensor>,
}

impl KvCache {
    pub fn new(layout: &KvLayout, num_blocks: usize, block_size: usize, device: &Device) -> Result<Self> {
        let shape = (num_blocks, block_size, layout.kv_heads, layout.head_dim);
        let zeros =
            || (0..layout.layers).map(|_| Tensor::zeros(shape, DType::F32, device)).collect::<Result<Vec<_>, _>>();
        Ok(Self { block_size, num_blocks, k: zeros()?, v: zeros()? })
    }
}

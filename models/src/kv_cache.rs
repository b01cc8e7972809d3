//! Paged key and value storage of all layers.

use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use cresset_kernels::memory::prefer_large_pages;
use half::f16;
use half::vec::HalfBitsVecExt;

/// What a model needs per cached token.
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

pub struct KvCache {
    pub block_size: usize,
    pub num_blocks: usize,
    /// Per layer: `[num_blocks, kv_heads, head_dim, block_size]`, so that one instruction reads a
    /// dimension of many keys.
    pub k: Vec<Tensor>,
    /// Per layer: `[num_blocks, kv_heads, block_size, head_dim]`.
    pub v: Vec<Tensor>,
}

impl KvCache {
    /// Attention is fastest where `block_size` is a multiple of sixteen.
    pub fn new(
        layout: &KvLayout,
        num_blocks: usize,
        block_size: usize,
        device: &Device,
    ) -> Result<Self> {
        let of_layers = |shape: [usize; 4]| {
            (0..layout.layers).map(|_| zeros(shape, layout.dtype, device)).collect()
        };
        let k: Result<_> = of_layers([num_blocks, layout.kv_heads, layout.head_dim, block_size]);
        let v: Result<_> = of_layers([num_blocks, layout.kv_heads, block_size, layout.head_dim]);
        Ok(Self { block_size, num_blocks, k: k?, v: v? })
    }
}

/// Zeros that the system has promised but not yet given, in large pages once it does.
fn zeros(shape: [usize; 4], dtype: DType, device: &Device) -> Result<Tensor> {
    let elements = shape.iter().product();
    let tensor = match dtype {
        DType::F32 => {
            let data = vec![0f32; elements];
            prefer_large_pages(&data);
            Tensor::from_vec(data, &shape, device)
        }
        DType::F16 => {
            let bits = vec![0u16; elements];
            prefer_large_pages(&bits);
            Tensor::from_vec(bits.reinterpret_into::<f16>(), &shape, device)
        }
        other => return Err(Error::Unsupported(format!("keys and values of type {other:?}"))),
    };
    Ok(tensor?)
}

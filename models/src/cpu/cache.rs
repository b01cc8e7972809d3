//! The KV cache in the machine's memory.

use crate::{Error, KvCache, KvLayout, Result};
use candle_core::{DType, Device, Tensor};
use cresset_kernels::Compute;
use cresset_kernels::memory::prefer_large_pages;
use half::f16;
use half::vec::HalfBitsVecExt;

impl KvCache<Compute> {
    /// Attention is fastest where `block_size` is a multiple of sixteen.
    pub fn new(layout: &KvLayout, num_blocks: usize, block_size: usize) -> Result<Self> {
        Self::with(layout, num_blocks, block_size, |len| zeros(len, layout.dtype))
    }
}

/// Returns zeros. The system gives the memory, in large pages, only when it is written.
fn zeros(len: usize, dtype: DType) -> Result<Tensor> {
    let tensor = match dtype {
        DType::F32 => {
            let data = vec![0f32; len];
            prefer_large_pages(&data);
            Tensor::from_vec(data, len, &Device::Cpu)
        }
        DType::F16 => {
            let bits = vec![0u16; len];
            prefer_large_pages(&bits);
            Tensor::from_vec(bits.reinterpret_into::<f16>(), len, &Device::Cpu)
        }
        other => return Err(Error::Unsupported(format!("keys and values of type {other:?}"))),
    };
    Ok(tensor?)
}

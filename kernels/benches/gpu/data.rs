//! Buffers of random values.

use crate::Result;
use cresset_kernels::gpu::{Buffer, Gpu, Kind};
use half::bf16;
use std::sync::Arc;

/// A value in (-1, 1) that follows from its index, so that no copy must be kept. bf16 holds it
/// exactly.
pub fn value(seed: usize, index: usize) -> f64 {
    let mixed = (index as u64 ^ (seed as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 56;
    (mixed as f64 - 127.5) / 128.0
}

pub fn bf16s(gpu: &Arc<dyn Gpu>, seed: usize, len: usize) -> Result<Arc<Buffer>> {
    let values: Vec<bf16> = (0..len).map(|i| bf16::from_f64(value(seed, i))).collect();
    Ok(Arc::new(Buffer::from_slice(gpu, &values)?))
}

/// A buffer full of NaN, so that values that are not written show.
pub fn output(gpu: &Arc<dyn Gpu>, kind: Kind, len: usize) -> Result<Arc<Buffer>> {
    let buffer = Buffer::new(gpu, kind, len)?;
    gpu.fill(buffer.view(), 0xff)?;
    Ok(Arc::new(buffer))
}

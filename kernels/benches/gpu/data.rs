//! Buffers of random values.

use crate::Result;
use cresset_kernels::gpu::{Buffer, Gpu, Kind};
use half::bf16;
use std::num::NonZero;
use std::sync::Arc;

/// A value in (-1, 1) that follows from its index, so that no copy must be kept. bf16 holds it
/// exactly.
pub fn value(seed: usize, index: usize) -> f64 {
    let mixed = (index as u64 ^ (seed as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 56;
    (mixed as f64 - 127.5) / 128.0
}

pub fn bf16s(gpu: &Arc<dyn Gpu>, seed: usize, len: usize) -> Result<Arc<Buffer>> {
    let mut values = vec![bf16::ZERO; len];
    in_parts(&mut values, 1, |first, part| {
        for (i, out) in part.iter_mut().enumerate() {
            *out = bf16::from_f64(value(seed, first + i));
        }
    });
    Ok(Arc::new(Buffer::from_slice(gpu, &values)?))
}

/// Fills the values on all cores: in parts of whole units, each with the place of its first value.
pub fn in_parts<T: Send>(values: &mut [T], unit: usize, fill: impl Fn(usize, &mut [T]) + Sync) {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let part = values.len().div_ceil(unit).div_ceil(cores).max(1) * unit;
    std::thread::scope(|scope| {
        for (i, part_of_them) in values.chunks_mut(part).enumerate() {
            let fill = &fill;
            scope.spawn(move || fill(i * part, part_of_them));
        }
    });
}

/// A buffer full of NaN, so that values that are not written show.
pub fn output(gpu: &Arc<dyn Gpu>, kind: Kind, len: usize) -> Result<Arc<Buffer>> {
    let buffer = Buffer::new(gpu, kind, len)?;
    gpu.fill(buffer.view(), 0xff)?;
    Ok(Arc::new(buffer))
}

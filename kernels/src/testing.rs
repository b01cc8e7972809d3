//! What op tests share: seeded random tensors, poisoned outputs, a comparison.

use crate::Compute;
use candle_core::{Device, Tensor};

pub fn compute() -> Compute {
    Compute::new(2)
}

/// Values in (-1, 1) from a linear congruential generator.
pub fn random(shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let data: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_vec(data, shape, &Device::Cpu).unwrap()
}

/// An output full of NaN, so that whatever a kernel forgets to write is seen.
pub fn poisoned(shape: &[usize]) -> Tensor {
    Tensor::full(f32::NAN, shape, &Device::Cpu).unwrap().contiguous().unwrap()
}

pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Each value within `tolerance` of the largest magnitude wanted.
pub fn assert_close(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let ok = (g - w).abs() <= tolerance * largest;
        assert!(ok, "{what}: value {i} is {g}, want {w} (largest {largest})");
    }
}

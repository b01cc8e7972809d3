//! Helpers for the tests of ops: seeded random tensors, poisoned outputs, a comparison.

mod e4m3;
mod packed;

pub use e4m3::{e4m3_cache, e4m3_rounded};
pub use packed::{Packed, random_blocks};

use crate::Compute;
use crate::gpu::{Buffer, Gpu, Kind, device_or_emulator};
use crate::linear::Weight;
use crate::linear::WeightType;
use candle_core::quantized::QTensor;
use candle_core::{DType, Device, Tensor};
use half::bf16;
use std::sync::Arc;

pub fn compute() -> Compute {
    Compute::new(2)
}

/// Values in (-1, 1) from a linear congruential generator.
pub fn random(shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let data: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_vec(data, shape, &Device::Cpu).unwrap()
}

/// An output full of NaN, so that values that a kernel does not write are found.
pub fn poisoned(shape: &[usize]) -> Tensor {
    Tensor::full(f32::NAN, shape, &Device::Cpu).unwrap().contiguous().unwrap()
}

pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// A matrix of weights of the tensor's own type: f32, f16 or bf16.
pub fn dense_weight(tensor: &Tensor) -> Weight {
    let (rows, cols) = tensor.dims2().unwrap();
    let dtype = match tensor.dtype() {
        DType::F32 => WeightType::F32,
        DType::F16 => WeightType::F16,
        DType::BF16 => WeightType::BF16,
        other => panic!("dense weights of type {other:?}"),
    };
    let exact = tensor.to_dtype(DType::F32).unwrap();
    let raw =
        QTensor::quantize(&exact, dtype.in_candle().unwrap()).unwrap().data().unwrap().into_owned();
    Weight::from_ggml(dtype, &raw, rows, cols).unwrap()
}

/// Checks that each value is within `tolerance` of the largest expected magnitude.
pub fn assert_close(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let ok = (g - w).abs() <= tolerance * largest;
        assert!(ok, "{what}: value {i} is {g}, want {w} (largest {largest})");
    }
}

/// The device on which kernels are tested: the machine's own if this build can use it.
pub fn gpu() -> Arc<dyn Gpu> {
    device_or_emulator(1 << 30, 4)
}

/// The kinds of activations, with the relative tolerance of a result rounded to each.
pub const KINDS: [(Kind, f32); 2] = [(Kind::F32, 1e-5), (Kind::Bf16, 1e-2)];

/// Values as a device of this kind would hold them.
pub fn rounded(kind: Kind, values: &[f32]) -> Vec<f32> {
    let round = |x: &f32| if kind == Kind::Bf16 { bf16::from_f32(*x).to_f32() } else { *x };
    values.iter().map(round).collect()
}

/// Values of either kind on a device.
pub fn upload(gpu: &Arc<dyn Gpu>, kind: Kind, values: &[f32]) -> Buffer {
    match kind {
        Kind::Bf16 => {
            Buffer::from_slice(gpu, &values.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>())
                .unwrap()
        }
        _ => Buffer::from_slice(gpu, values).unwrap(),
    }
}

/// An output of either kind, full of NaN.
pub fn poisoned_buffer(gpu: &Arc<dyn Gpu>, kind: Kind, len: usize) -> Buffer {
    let buffer = Buffer::new(gpu, kind, len).unwrap();
    gpu.fill(buffer.view(), 0xff).unwrap();
    buffer
}

pub fn downloaded(buffer: &Buffer) -> Vec<f32> {
    match buffer.view().kind() {
        Kind::Bf16 => buffer.to_vec::<bf16>().unwrap().into_iter().map(bf16::to_f32).collect(),
        _ => buffer.to_vec::<f32>().unwrap(),
    }
}

//! Matrices in the packed form of every format, for the tests of device kernels.

use super::{random, values};
use crate::linear::{DeviceFormat, Weight, WeightType};
use candle_core::quantized::QTensor;
use candle_core::{Device, Tensor};
use half::f16;

/// A matrix in a format, and its values.
pub struct Packed {
    pub format: DeviceFormat,
    pub bytes: Vec<u8>,
    pub values: Vec<f32>,
    pub rows: usize,
    pub cols: usize,
}

impl Packed {
    pub fn new(dtype: WeightType, rows: usize, cols: usize) -> Self {
        let raw = match dtype.in_candle() {
            Some(_) => quantised(dtype, rows, cols),
            None => random_blocks(dtype, rows * cols / dtype.block_size()),
        };
        Self::of(dtype, &raw, rows, cols)
    }

    /// The matrix of these blocks.
    pub fn of(dtype: WeightType, raw: &[u8], rows: usize, cols: usize) -> Self {
        let format = DeviceFormat::of(dtype).unwrap();
        let mut bytes = vec![0xaa; format.bytes(rows, cols)];
        format.pack(raw, cols, &mut bytes).unwrap();
        let weight = Weight::from_ggml(dtype, raw, rows, cols).unwrap();
        let mut values = vec![0.0; rows * cols];
        let all = values.chunks_exact_mut(cols).enumerate();
        all.for_each(|(row, values)| weight.row_f32(row, values));
        Self { format, bytes, values, rows, cols }
    }
}

/// Weights that have an offset, as the formats with minimums are for.
fn quantised(dtype: WeightType, rows: usize, cols: usize) -> Vec<u8> {
    let dense = values(&random(&[rows, cols], (rows * cols) as u64));
    let dense = dense.iter().enumerate().map(|(i, x)| x * 0.1 + (i / 32 % 5) as f32 * 0.02);
    let dense = Tensor::from_vec(dense.collect(), (rows, cols), &Device::Cpu).unwrap();
    let quantised = QTensor::quantize(&dense, dtype.in_candle().unwrap()).unwrap();
    quantised.data().unwrap().into_owned()
}

/// Blocks of a type that candle does not have: random codes, with scales in the form that files
/// have. Those of floats of eight bits are f32 numbers.
pub fn random_blocks(dtype: WeightType, blocks: usize) -> Vec<u8> {
    let (size, name) = (dtype.type_size(), dtype.name());
    let random = values(&random(&[blocks * size], blocks as u64));
    let mut raw: Vec<u8> = random.iter().map(|x| (x * 128.0 + 128.0) as u8).collect();
    for (block, random) in raw.chunks_exact_mut(size).zip(random.chunks_exact(size)) {
        if dtype == WeightType::MXFP4 {
            block[0] = 120 + (random[0] * 4.0) as u8;
            continue;
        }
        let scale = 0.003 * (2.0 + random[0]);
        let scale = if name.starts_with('I') { f16::from_f32(scale).to_f32() } else { scale };
        block[..4].copy_from_slice(&scale.to_le_bytes());
        if name.starts_with("INT4") {
            block[4] &= 15;
        }
        // Codes that are no finite numbers become others.
        let finite = if dtype == WeightType::E5M2By32 { 0xbf } else { 0xfe };
        if name.starts_with('F') {
            block[4..].iter_mut().for_each(|code| *code &= finite);
        }
    }
    raw
}

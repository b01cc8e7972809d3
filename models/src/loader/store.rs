//! The destination of a model's weights: one reader of files fills the CPU's form of them, or a
//! device's.

use crate::Result;
use cresset_kernels::gpu::DeviceElement;
use cresset_kernels::linear::Weight;
use cresset_kernels::linear::WeightType;
use cresset_kernels::{Compute, OpMemory};
use half::{bf16, f16};
use std::sync::Arc;

/// A matrix as its file has it: little-endian, row-major.
#[derive(Clone, Copy)]
pub struct Raw<'a> {
    pub dtype: WeightType,
    pub bytes: &'a [u8],
    pub rows: usize,
    pub cols: usize,
    /// The inputs of its columns, where those are in another order.
    pub order: Option<&'a Arc<[u32]>>,
}

/// Puts weights where the ops of `M` read them.
pub trait WeightStore<M: OpMemory> {
    /// Stacks matrices of one width, one below the other.
    fn matrix(&mut self, parts: &[Raw]) -> Result<M::Matrix>;
    /// Stacks the matrices of experts.
    fn experts(&mut self, parts: &[Raw]) -> Result<M::Matrix> {
        self.matrix(parts)
    }
    /// Keeps the weights of a norm, in f32.
    fn norm(&mut self, values: Vec<f32>) -> Result<M::Buffer>;
    /// Keeps a bias, in the activations' kind.
    fn bias(&mut self, values: Vec<f32>) -> Result<M::Buffer>;
}

impl<'a> Raw<'a> {
    pub fn weight(&self, compute: &Compute) -> Result<Weight> {
        let weight = Weight::packed(compute, self.dtype, self.bytes, self.rows, self.cols)?;
        Ok(match self.order {
            Some(order) => weight.with_order(order.clone())?,
            None => weight,
        })
    }

    /// Bytes of a row.
    pub fn stride(&self) -> usize {
        self.cols / self.dtype.block_size() * self.dtype.type_size()
    }

    /// Returns `rows` of its rows, from `first` on.
    pub fn slice(&self, first: usize, rows: usize) -> Raw<'a> {
        let stride = self.stride();
        Raw { bytes: &self.bytes[first * stride..(first + rows) * stride], rows, ..*self }
    }

    /// Returns all values, row by row, in the order of the inputs.
    pub fn values(&self) -> Result<Vec<f32>> {
        Ok(match self.dtype {
            WeightType::F32 if self.order.is_none() => f32::decode(self.bytes),
            WeightType::F16 if self.order.is_none() => {
                self.bytes.as_chunks().0.iter().map(|x| f16::from_le_bytes(*x).to_f32()).collect()
            }
            WeightType::BF16 if self.order.is_none() => {
                bf16::decode(self.bytes).into_iter().map(bf16::to_f32).collect()
            }
            _ => {
                let weight = self.weight(&Compute::new(1))?;
                let mut values = vec![0.0; self.rows * self.cols];
                let rows = values.chunks_exact_mut(self.cols.max(1));
                rows.enumerate().for_each(|(row, out)| weight.row_f32(row, out));
                values
            }
        })
    }
}

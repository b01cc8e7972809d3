//! The tensors that the header of a safetensors file lists.

use super::quantised::form::JoinedTensor;
use cresset_kernels::linear::WeightType;
use safetensors::tensor::Dtype;
use std::ops::Range;

/// A tensor, or several that make up a quantised one.
pub(super) struct ShardEntry {
    pub shard: usize,
    pub shape: Vec<usize>,
    /// The type of the stored values.
    pub stored: Dtype,
    /// `None`: they are no weights by themselves, but part of a quantised tensor.
    pub dtype: Option<WeightType>,
    pub range: Range<usize>,
    /// The stored tensors that it is made of, if it is not stored itself.
    pub joined: Option<JoinedTensor>,
}

impl ShardEntry {
    pub(super) fn joined(shape: Vec<usize>, dtype: WeightType, joined: JoinedTensor) -> Self {
        let (dtype, joined) = (Some(dtype), Some(joined));
        Self { shard: 0, shape, stored: Dtype::U8, dtype, range: 0..0, joined }
    }
}

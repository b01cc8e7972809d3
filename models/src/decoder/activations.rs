//! The memory of activations.

use cresset_kernels::Ops;
use cresset_kernels::operand::Operand;
use std::sync::Arc;

/// A matrix of activations, allocated once for the largest step. Clones share the memory.
pub struct Activations<O: Ops> {
    pub(super) buffer: Arc<O::Buffer>,
    pub width: usize,
}

impl<O: Ops> Clone for Activations<O> {
    fn clone(&self) -> Self {
        Self { buffer: self.buffer.clone(), width: self.width }
    }
}

impl<O: Ops> Activations<O> {
    /// The first `rows` rows.
    pub fn first(&self, rows: usize) -> O::View<'_> {
        O::view(&self.buffer).slice(0..rows * self.width)
    }
}

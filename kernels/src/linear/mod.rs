//! `out[n, rows] = x[n, cols] · Wᵀ (+ bias)` with dense or block-quantised weights.
//!
//! Dense weights and floats of eight bits are multiplied with f32 activations by fused
//! multiply-adds (`tile`). Block-quantised weights stay quantised in memory, and their codes, where
//! they are integers, are multiplied with activations rounded to sixteen bits (`rounding`) in exact
//! integer sums (`integer`). On a device the codes are multiplied with activations in bf16, in sums
//! of f32 (`gpu`).
#![expect(
    clippy::inline_always,
    reason = "vector code must end up inside the function that enables its instructions"
)]

mod args;
mod cpu;
mod device_format;
mod format;
pub mod gpu;
mod i_quants;
mod integer;
mod machines;
mod matmul;
mod pack;
mod reference;
mod rounding;
mod super_block;
#[cfg(test)]
mod tests;
mod tile;
mod values;
mod weight;
mod weight_type;

pub use args::{HeadLinearArgs, LinearArgs, Mode};
pub use device_format::{BAND_ROWS, DeviceFormat, packed_types};
pub(crate) use matmul::run_chosen;
pub use reference::{linear as linear_reference, rounded_to_e4m3};

use crate::Result;
use crate::operand::OpMemory;
use weight::OP;
pub use weight::Weight;
pub use weight_type::WeightType;

const HEADS: &str = "head_linear";

pub trait Linear: OpMemory {
    /// Each output is summed in an order that depends on `cols` and the weight's type alone (on a
    /// device with [`Mode::Invariant`]), never on `n`, the thread count or neighbours: one row
    /// gives the same bits alone and in a batch.
    fn linear(&self, args: &LinearArgs<Self::View<'_>>) -> Result<()>;

    /// The same where the rows of `x` are rounded already, if products with the matrix round them:
    /// by a norm or an activation. The result is that of `linear`, which rounds them once more.
    fn rounded_linear(&self, args: &LinearArgs<Self::View<'_>>) -> Result<()> {
        self.linear(args)
    }

    /// The products of heads with matrices of their own, summed in the same order. A device has no
    /// kernel for them yet.
    fn head_linear(&self, args: &HeadLinearArgs<Self::View<'_>>) -> Result<()>;
}

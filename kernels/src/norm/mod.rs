//! RMSNorm: alone, fused with the residual addition before it or behind it, and of a part of each
//! row. Sums are in f32 per row, and a row's result never depends on other rows. Zhang and Sennrich
//! 2019, "Root Mean Square Layer Normalization".

mod args;
mod cpu;
mod gpu;
#[cfg(test)]
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use args::{AddNormedArgs, NormArgs, NormColumnsArgs};
pub(crate) use cpu::rms_norm;

use crate::Result;
use crate::operand::OpMemory;

pub trait Norm: OpMemory {
    fn norm(&self, args: &NormArgs<Self::View<'_>>) -> Result<()>;

    fn add_normed(&self, args: &AddNormedArgs<Self::View<'_>>) -> Result<()>;

    fn norm_columns(&self, args: &NormColumnsArgs<Self::View<'_>>) -> Result<()>;
}

//! Exchanges between the devices that compute one model together (tensor parallelism; Shoeybi et
//! al. 2019, "Megatron-LM"). Each rank computes a part of the sums of some products, which an
//! all-reduce adds up, and some columns of the logits; afterwards every rank has the whole, with
//! the same bits on each.

mod args;
mod cpu;
mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use args::{AllReduceArgs, GatherColumnsArgs};

use crate::Result;
use crate::gpu::Rank;
use crate::operand::OpMemory;

pub trait Ranks: OpMemory {
    /// The place of these ops among those that compute a model together.
    fn rank(&self) -> Rank;

    fn all_reduce(&self, args: &AllReduceArgs<Self::View<'_>>) -> Result<()>;

    fn gather_columns(&self, args: &GatherColumnsArgs<Self::View<'_>>) -> Result<()>;
}

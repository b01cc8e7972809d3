//! Looks up rows by their numbers: token embeddings, and the rows of a step that get logits.

mod args;
mod cpu;
mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use args::{DeviceTokens, GatherArgs, SelectRowsArgs};

use crate::Result;
use crate::operand::OpMemory;

pub trait Embedding: OpMemory {
    fn gather(&self, args: &GatherArgs<Self::View<'_>>) -> Result<()>;
    fn select_rows(&self, args: &SelectRowsArgs<Self::View<'_>>) -> Result<()>;
}

//! Causal attention of a ragged batch over the paged KV cache (paged attention; Kwon et al. 2023),
//! grouped heads, optional sliding window, soft cap and sinks.

mod args;
mod cpu;
pub mod gpu;
pub mod plan;
mod query_tile;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
mod tile;

pub use args::{AttentionArgs, AttentionShape};
pub use cpu::HostSequences;

use crate::Result;
use crate::operand::OpMemory;
use std::fmt::Debug;

const OP: &str = "paged_attention";

pub trait Attention: OpMemory {
    /// The sequences of a step: which queries, tokens and blocks belong to each.
    type Sequences<'a>: Copy + Debug;

    /// A query's result depends only on its own keys. On the CPU, and on a device where the cuts of
    /// keys are fixed, it has the same bits alone, in a batch, and however its prompt was chunked.
    fn attend(&self, args: &AttentionArgs<Self::View<'_>, Self::Sequences<'_>>) -> Result<()>;
}

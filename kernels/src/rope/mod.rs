//! Optional per-head QK-norm, rotary position embedding and the write into the paged KV cache,
//! fused. Su et al. 2021, "RoFormer".

mod args;
mod cpu;
mod gpu;
mod latent;
#[cfg(test)]
mod reference;
mod rotation;
#[cfg(test)]
mod tests;

pub use args::{E4M3, QkNorm, RopeArgs, RopeLatentArgs, RopeTable, cached};

use crate::Result;
use crate::operand::OpMemory;

const OP: &str = "rope_kv_write";
const LATENT: &str = "rope_latent";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs (i, i + d/2): HF checkpoints and GGUF "neox" families.
    Neox,
    /// Pairs (2i, 2i + 1): GGUF files of the llama architecture, whose Q and K rows are permuted
    /// for it.
    Interleaved,
}

pub trait Rope: OpMemory {
    /// The CPU checks every position and slot before it writes anything. A device fails the step if
    /// one is outside of the tables or the cache.
    fn rope_kv_write(&self, args: &RopeArgs<Self::View<'_>>) -> Result<()>;

    /// Puts queries together and writes what latent attention caches, with the same checks.
    fn rope_latent(&self, args: &RopeLatentArgs<Self::View<'_>>) -> Result<()>;
}

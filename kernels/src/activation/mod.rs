//! Gated activations (`out = act(gate) * up`, and one that changes `up` too; Shazeer 2020, "GLU
//! Variants Improve Transformer") and the soft cap of logits.

mod args;
mod cpu;
mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use args::{GateArgs, GatedArgs};
pub(crate) use cpu::{gated_row, silu};
pub(crate) use gpu::{GatedRows, launch_gated, vector};

use crate::Result;
use crate::operand::OpMemory;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
    /// GPT-OSS's: gates are at most `limit`, and the others within ± `limit`. Their product is
    /// `gate * sigmoid(alpha * gate) * (up + 1)`.
    ClampedSwiglu {
        alpha: f32,
        limit: f32,
    },
}

pub trait Gated: OpMemory {
    fn gated(&self, args: &GatedArgs<Self::View<'_>>) -> Result<()>;

    fn gate(&self, args: &GateArgs<Self::View<'_>>) -> Result<()>;
}

pub trait SoftCap: OpMemory {
    /// `values = cap * tanh(values / cap)` in place; f32.
    fn soft_cap(&self, values: Self::View<'_>, cap: f32) -> Result<()>;
}

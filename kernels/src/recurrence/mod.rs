//! Layers that carry a state of fixed size from token to token, where attention keeps keys and
//! values of all tokens: short causal convolutions (Liquid AI 2025, LFM2) and the gated delta rule
//! (Yang et al. 2024, "Gated Delta Networks"). Each sequence's tokens are computed one after the
//! other, so results depend neither on how a prompt was cut nor on other sequences.

mod args;
mod cpu;
mod gpu;
#[cfg(test)]
pub(crate) mod reference;
mod scan;
mod sequences;
#[cfg(test)]
mod tests;

pub use args::{
    ConvForm, DeltaRuleArgs, DeltaShape, GateOrder, GatedNormArgs, HeadMap, NO_STATE, ScanShape,
    SelectiveScanArgs, ShortConvArgs, StateMoves,
};

use crate::Result;
use crate::operand::OpMemory;

pub trait Recurrence: OpMemory {
    fn short_conv(&self, args: &ShortConvArgs<Self::View<'_>>) -> Result<()>;

    fn delta_rule(&self, args: &DeltaRuleArgs<Self::View<'_>>) -> Result<()>;

    fn selective_scan(&self, args: &SelectiveScanArgs<Self::View<'_>>) -> Result<()>;

    fn gated_norm(&self, args: &GatedNormArgs<Self::View<'_>>) -> Result<()>;
}

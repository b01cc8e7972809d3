//! Products of activations with numbers that belong to a layer, a token or an expert, as Gemma 4
//! has them: its residual stream is scaled behind each layer, each token has an input of its own
//! for every layer, and the weights of experts are multiplied by factors of the experts.

mod args;
mod cpu;
mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

pub use args::{ChoiceFactorsArgs, LayerInputArgs, ScaleArgs};

use crate::Result;
use crate::operand::OpMemory;

pub trait Factors: OpMemory {
    fn scale(&self, args: &ScaleArgs<Self::View<'_>>) -> Result<()>;

    fn layer_input(&self, args: &LayerInputArgs<Self::View<'_>>) -> Result<()>;

    fn choice_factors(&self, args: &ChoiceFactorsArgs<Self::View<'_>>) -> Result<()>;
}

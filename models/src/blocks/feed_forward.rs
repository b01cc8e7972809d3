//! The part of a layer after its attention: one MLP, or a mixture of experts.

use super::mixture::Mixture;
use super::mlp::Mlp;
use crate::Result;
use crate::decoder::{LayerLoader, LayerStep, Stream};
use cresset_kernels::Ops;

pub enum FeedForward<O: Ops> {
    Dense(Mlp<O>),
    Mixture(Box<Mixture<O>>),
}

impl<O: Ops> FeedForward<O> {
    /// `prefix` ends with a dot.
    pub fn load(l: &mut LayerLoader<O>, prefix: &str) -> Option<Self> {
        match &l.spec.config.mixture {
            Some(config) if config.layers[l.layer] => {
                Some(Self::Mixture(Box::new(Mixture::load(l, config, prefix)?)))
            }
            _ => Mlp::load(l, prefix).map(Self::Dense),
        }
    }

    /// `x.input()` → `x.sublayer_out()`.
    pub fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        match self {
            Self::Dense(mlp) => mlp.forward(s, x),
            Self::Mixture(mixture) => mixture.forward(s, x),
        }
    }
}

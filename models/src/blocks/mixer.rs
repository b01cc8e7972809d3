//! The part of a layer that mixes tokens: attention, or a recurrence.

use super::attention::SelfAttention;
use super::latent_attention::LatentAttention;
use super::recurrence::RecurrentMixer;
use super::short_conv::ShortConv;
use crate::Result;
use crate::config::RecurrentKind;
use crate::decoder::{LayerLoader, LayerStep, Stream};
use cresset_kernels::Ops;

pub enum TokenMixer<O: Ops> {
    Attention(Box<SelfAttention<O>>),
    Latent(Box<LatentAttention<O>>),
    ShortConv(Box<ShortConv<O>>),
    Recurrence(Box<RecurrentMixer<O>>),
}

impl<O: Ops> TokenMixer<O> {
    /// `prefix` ends with a dot.
    pub fn load(l: &mut LayerLoader<O>, prefix: &str) -> Option<Self> {
        Some(match l.spec.config.recurrence(l.layer) {
            None => match l.spec.config.latent {
                Some(latent) => Self::Latent(Box::new(LatentAttention::load(l, prefix, latent)?)),
                None => Self::Attention(Box::new(SelfAttention::load(l, prefix)?)),
            },
            Some(RecurrentKind::ShortConv { taps }) => {
                Self::ShortConv(Box::new(ShortConv::load(l, prefix, taps)?))
            }
            Some(RecurrentKind::DeltaRule { shape, taps }) => {
                Self::Recurrence(Box::new(RecurrentMixer::delta_rule(l, prefix, shape, taps)?))
            }
            Some(RecurrentKind::SelectiveScan(config)) => {
                Self::Recurrence(Box::new(RecurrentMixer::selective_scan(l, prefix, config)?))
            }
        })
    }

    /// `x.input()` → `x.sublayer_out()`, with what later tokens need in the cache.
    pub fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        match self {
            Self::Attention(attention) => attention.forward(s, x),
            Self::Latent(attention) => attention.forward(s, x),
            Self::ShortConv(conv) => conv.forward(s, x),
            Self::Recurrence(recurrence) => recurrence.forward(s, x),
        }
    }
}

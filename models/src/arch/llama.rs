//! Llama 2 and 3, and models of their shape (SmolLM2). Touvron et al. 2023; Grattafiori et al.
//! 2024.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use crate::Result;
use crate::blocks::feed_forward::FeedForward;
use crate::blocks::mixer::TokenMixer;
use crate::config::Sliding;
use crate::decoder::{Layer, LayerLoader, LayerStep, Stream};
use crate::spec::{ArchSpec, LayerOptions, Presence};
use cresset_kernels::Ops;
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

/// GGUF files of this name hold Mistral and Mixtral too; the converter permutes the rows of Q and K
/// for interleaved rotation.
pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = keys.decoder()?;
    config.sliding = keys
        .size("attention.sliding_window")?
        .map(|window| Sliding::everywhere(window, config.layers));
    if keys.has("expert_count") {
        config.mixture = Some(keys.mixture(&config, true)?);
    }
    let options = LayerOptions {
        qkv_bias: Presence::Optional,
        output_bias: Presence::Optional,
        mlp_bias: Presence::Optional,
        ..LayerOptions::plain(RopeStyle::Interleaved)
    };
    Ok(ArchSpec { config, options })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let options = hf_options(keys)?;
    Ok(ArchSpec { config: keys.decoder(false)?, options })
}

/// The biases and the activation that a config states.
pub(super) fn hf_options(keys: &mut HfConfigKeys) -> Result<LayerOptions> {
    let attention_bias = Presence::when(keys.flag("attention_bias")?);
    Ok(LayerOptions {
        activation: keys.activation("hidden_act", Activation::Silu)?,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        mlp_bias: Presence::when(keys.flag("mlp_bias")?),
        ..LayerOptions::plain(RopeStyle::Neox)
    })
}

/// Attention or a recurrence, and an MLP or experts, each after a norm of the residual stream.
pub(super) struct LlamaLayer<O: Ops> {
    mixer_norm: O::Buffer,
    mixer: TokenMixer<O>,
    mlp_norm: O::Buffer,
    feed_forward: FeedForward<O>,
}

impl<O: Ops> LlamaLayer<O> {
    pub(super) fn load(l: &mut LayerLoader<O>) -> Option<Self> {
        let (prefix, hidden) = (l.prefix(), l.spec.config.hidden_size);
        let mut norm = |name| l.tensors.norm(&format!("{prefix}{name}.weight"), hidden);
        let mixer_norm = norm("input_layernorm");
        let mlp_norm = norm("post_attention_layernorm");
        let (mixer, feed_forward) = (TokenMixer::load(l, &prefix), FeedForward::load(l, &prefix));
        Some(Self {
            mixer_norm: mixer_norm?,
            mixer: mixer?,
            mlp_norm: mlp_norm?,
            feed_forward: feed_forward?,
        })
    }
}

impl<O: Ops> Layer<O> for LlamaLayer<O> {
    fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        s.add_norm(&self.mixer_norm, x)?;
        self.mixer.forward(s, x)?;
        s.add_norm(&self.mlp_norm, x)?;
        self.feed_forward.forward(s, x)
    }
}

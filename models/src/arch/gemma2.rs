//! Gemma 2: norms on both sides of each sub-layer, soft caps, every other layer with a sliding
//! window. Riviere et al. 2024.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use crate::blocks::attention::SelfAttention;
use crate::blocks::mlp::Mlp;
use crate::config::Sliding;
use crate::decoder::{Layer, LayerLoader, LayerStep, Stream};
use crate::spec::{ArchSpec, LayerKind, LayerOptions, NameMap, Presence};
use crate::{ModelConfig, Result};
use cresset_kernels::Ops;
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

/// The options of Gemma 2 and 3. In GGUF files, the converter has already added one to the norms'
/// weights.
pub(super) const OPTIONS: LayerOptions = LayerOptions {
    activation: Activation::GeluTanh,
    layer: LayerKind::Gemma2,
    names: NameMap {
        gguf: &[("post_attention_layernorm", "post_attention_norm")],
        ..NameMap::USUAL
    },
    ..LayerOptions::plain(RopeStyle::Neox)
};

const PATTERN: usize = 2;
const WINDOW: usize = 4096;
const LAYERS_OF_27B: usize = 46;

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = gguf_decoder(keys, LAYERS_OF_27B)?;
    let window = keys.size("attention.sliding_window")?.unwrap_or(WINDOW);
    let layers = keys.sliding_layers(config.layers, PATTERN)?;
    config.sliding = Some(Sliding { window, layers, rope: None, heads: None });
    config.attention_softcap = keys.float("attn_logit_softcapping")?;
    Ok(ArchSpec { config, options: OPTIONS })
}

/// GGUF does not give the attention's scale. Of all sizes, only the largest has a scale that does
/// not follow from the size of its heads.
pub(super) fn gguf_decoder(keys: &mut GgufConfigKeys, layers_of_27b: usize) -> Result<ModelConfig> {
    let mut config = keys.decoder()?;
    if config.layers == layers_of_27b {
        config.attention_scale = 1.0 / (config.hidden_size as f32 / config.heads as f32).sqrt();
    }
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    config.logits_softcap = keys.float("final_logit_softcapping")?;
    Ok(config)
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let (mut config, options) = hf_decoder(keys)?;
    config.attention_softcap = keys.take("attn_logit_softcapping")?;
    let window = keys.window(WINDOW)?;
    config.sliding = keys.sliding(&config, window, |layer| (layer + 1) % PATTERN != 0)?;
    Ok(ArchSpec { config, options })
}

/// Reads the settings that Gemma 2 and 3 share.
pub(super) fn hf_decoder(keys: &mut HfConfigKeys) -> Result<(ModelConfig, LayerOptions)> {
    // The configs of the first models name the activation in a key that the reference ignores.
    keys.take::<String>("hidden_act")?;
    let bias = Presence::when(keys.flag("attention_bias")?);
    let options = LayerOptions {
        activation: keys.activation("hidden_activation", OPTIONS.activation)?,
        qkv_bias: bias,
        output_bias: bias,
        names: NameMap { norms_less_one: true, ..OPTIONS.names },
        ..OPTIONS
    };
    let mut config = keys.decoder(true)?;
    let scalar: f32 = keys.take("query_pre_attn_scalar")?.unwrap_or(256.0);
    config.attention_scale = 1.0 / scalar.sqrt();
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    config.logits_softcap = keys.take("final_logit_softcapping")?;
    Ok((config, options))
}

/// Attention and MLP, each between a norm of the residual stream and a norm of its own result.
pub(super) struct Gemma2Layer<O: Ops> {
    attention_norm: O::Buffer,
    attention: SelfAttention<O>,
    post_attn_norm: O::Buffer,
    mlp_norm: O::Buffer,
    mlp: Mlp<O>,
    post_mlp_norm: O::Buffer,
}

impl<O: Ops> Gemma2Layer<O> {
    pub(super) fn load(l: &mut LayerLoader<O>) -> Option<Self> {
        let (prefix, hidden) = (l.prefix(), l.spec.config.hidden_size);
        let mut norm = |name| l.tensors.norm(&format!("{prefix}{name}.weight"), hidden);
        let attention_norm = norm("input_layernorm");
        let post_attn_norm = norm("post_attention_layernorm");
        let mlp_norm = norm("pre_feedforward_layernorm");
        let post_mlp_norm = norm("post_feedforward_layernorm");
        let (attention, mlp) = (SelfAttention::load(l, &prefix), Mlp::load(l, &prefix));
        Some(Self {
            attention_norm: attention_norm?,
            attention: attention?,
            post_attn_norm: post_attn_norm?,
            mlp_norm: mlp_norm?,
            mlp: mlp?,
            post_mlp_norm: post_mlp_norm?,
        })
    }
}

impl<O: Ops> Layer<O> for Gemma2Layer<O> {
    fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        s.add_norm(&self.attention_norm, x)?;
        self.attention.forward(s, x)?;
        s.norm_sublayer_out(&self.post_attn_norm, x)?;
        s.add_norm(&self.mlp_norm, x)?;
        self.mlp.forward(s, x)?;
        s.norm_sublayer_out(&self.post_mlp_norm, x)
    }
}

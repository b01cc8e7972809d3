//! OLMo 2: Llama's parts, but each sub-layer reads the residual stream as it is and its result is
//! normed, and Q and K are normed as whole vectors. OLMo Team 2024, "2 OLMo 2 Furious".
//! OLMo 3: the same with a window in three of four layers, whose rotation is not scaled.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::hf_rope;
use crate::Result;
use crate::blocks::attention::SelfAttention;
use crate::blocks::mlp::Mlp;
use crate::config::{RopeConfig, RopeScaling, Sliding};
use crate::decoder::{Layer, LayerLoader, LayerStep, Stream};
use crate::spec::{ArchSpec, LayerKind, LayerOptions, NameMap, Presence, QkNorms};
use cresset_kernels::Ops;
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

const OPTIONS: LayerOptions = LayerOptions {
    layer: LayerKind::Olmo2,
    qk_norm: QkNorms::AllHeads,
    names: NameMap {
        gguf: &[("post_attention_layernorm", "post_attention_norm")],
        ..NameMap::USUAL
    },
    ..LayerOptions::plain(RopeStyle::Neox)
};

/// The values of settings that a config does not have.
const OLMO3_THETA: f32 = 500_000.0;
const WINDOW: usize = 4096;
/// One layer of this number has no window.
const PATTERN: usize = 4;

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = keys.decoder()?;
    if let Some(window) = keys.size("attention.sliding_window")? {
        let layers = keys.sliding_layers(config.layers, PATTERN)?;
        let theta = keys.float("rope.freq_base_swa")?.unwrap_or(config.rope.theta);
        let rope = Some(RopeConfig { theta, scaling: RopeScaling::None, ..config.rope.clone() });
        config.sliding = Some(Sliding { window, layers, rope, heads: None });
    }
    Ok(ArchSpec { config, options: OPTIONS })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let bias = Presence::when(keys.flag("attention_bias")?);
    let options = LayerOptions {
        activation: keys.activation("hidden_act", Activation::Silu)?,
        qkv_bias: bias,
        output_bias: bias,
        ..OPTIONS
    };
    Ok(ArchSpec { config: keys.decoder(false)?, options })
}

pub(super) fn olmo3_from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    // In the older layout it is that of full layers alone, as transformers reads it.
    let theta = keys.take("rope_theta")?.unwrap_or(OLMO3_THETA);
    let ropes = hf_rope::by_kind(keys, [theta, OLMO3_THETA])?;
    let ArchSpec { mut config, options } = from_hf(keys)?;
    let rope = Some(hf_rope::apply_by_kind(ropes, &mut config)?);
    let window = keys.window(WINDOW)?;
    let sliding = keys.sliding(&config, window, |layer| (layer + 1) % PATTERN != 0)?;
    config.sliding = sliding.map(|sliding| Sliding { rope, ..sliding });
    Ok(ArchSpec { config, options })
}

/// Attention and MLP, whose results are normed before they are added to the residual stream.
pub(super) struct Olmo2Layer<O: Ops> {
    attention: SelfAttention<O>,
    post_attention_norm: O::Buffer,
    mlp: Mlp<O>,
    post_mlp_norm: O::Buffer,
}

impl<O: Ops> Olmo2Layer<O> {
    pub(super) fn load(l: &mut LayerLoader<O>) -> Option<Self> {
        let (prefix, hidden) = (l.prefix(), l.spec.config.hidden_size);
        let mut norm = |name| l.tensors.norm(&format!("{prefix}{name}.weight"), hidden);
        let post_attention_norm = norm("post_attention_layernorm");
        let post_mlp_norm = norm("post_feedforward_layernorm");
        let (attention, mlp) = (SelfAttention::load(l, &prefix), Mlp::load(l, &prefix));
        Some(Self {
            attention: attention?,
            post_attention_norm: post_attention_norm?,
            mlp: mlp?,
            post_mlp_norm: post_mlp_norm?,
        })
    }
}

impl<O: Ops> Layer<O> for Olmo2Layer<O> {
    fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        self.attention.forward(s, x)?;
        s.add_normed(&self.post_attention_norm, x)?;
        self.mlp.forward(s, x)?;
        s.add_normed(&self.post_mlp_norm, x)
    }
}

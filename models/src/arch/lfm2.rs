//! LFM2: Llama's block, where most layers have a gated short convolution in place of attention. A
//! larger one has experts behind its first layers, routed by sigmoids and biases. Liquid AI 2025.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use crate::config::{Recurrent, RecurrentKind, RouterScoring};
use crate::spec::{ArchSpec, LayerOptions, NameMap, QkNorms};
use crate::{ModelConfig, Result};
use cresset_kernels::rope::RopeStyle;

const OPTIONS: LayerOptions = LayerOptions {
    qk_norm: QkNorms::EachHead,
    names: NameMap {
        gguf: &[
            ("model.norm.weight", "token_embd_norm.weight"),
            ("conv.in_proj", "shortconv.in_proj"),
            ("conv.conv", "shortconv.conv"),
            ("conv.out_proj", "shortconv.out_proj"),
            ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
        ],
        hf: &[
            ("model.norm.", "model.embedding_norm."),
            ("input_layernorm", "operator_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("self_attn.q_norm", "self_attn.q_layernorm"),
            ("self_attn.k_norm", "self_attn.k_layernorm"),
            ("self_attn.o_proj", "self_attn.out_proj"),
            ("mlp.gate.e_score_correction_bias", "feed_forward.expert_bias"),
            ("mlp.", "feed_forward."),
            (".gate_proj.weight", ".w1.weight"),
            (".up_proj.weight", ".w3.weight"),
            (".down_proj.weight", ".w2.weight"),
        ],
        ..NameMap::USUAL
    },
    ..LayerOptions::plain(RopeStyle::Neox)
};

/// The rotation's base if the config has none.
const THETA: f32 = 1_000_000.0;
/// The norms' epsilon if it has none.
const EPSILON: f32 = 1e-5;

/// Layers of the kind that a config lists: convolutions where there is no attention.
fn spec(mut config: ModelConfig, taps: usize, layers: Vec<bool>) -> ArchSpec {
    let kind = RecurrentKind::ShortConv { taps };
    config.recurrent = layers.contains(&true).then_some(Recurrent { kind, layers });
    ArchSpec { config, options: OPTIONS }
}

/// Layers without KV heads are those with a convolution.
pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let (config, recurrent) = keys.decoder_with_gaps()?;
    let taps = keys.needed("shortconv.l_cache")?;
    Ok(spec(config, taps, recurrent))
}

pub(super) fn moe_from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let ArchSpec { mut config, options } = from_gguf(keys)?;
    config.mixture = Some(keys.sigmoid_mixture(&config)?);
    Ok(ArchSpec { config, options })
}

/// What the first releases' configs say in further keys, which repeat others.
const REPEATED: [(&str, &str); 5] = [
    ("block_dim", "hidden_size"),
    ("conv_dim", "hidden_size"),
    ("conv_dim_out", "hidden_size"),
    ("num_heads", "num_attention_heads"),
    ("block_norm_eps", "norm_eps"),
];

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    for (key, of) in REPEATED {
        keys.take_repeated(key, of)?;
    }
    for key in ["block_use_swiglu", "use_pos_enc"] {
        if !keys.take(key)?.unwrap_or(true) {
            return Err(keys.unsupported(&format!("`{key}` is off, which is not supported")));
        }
    }
    let width = keys.take::<usize>("block_ff_dim")?;
    if let Some(width) = width {
        keys.default("intermediate_size", width);
    }
    let ArchSpec { mut config, options } = hf_spec(keys)?;
    config.intermediate_size = adjusted(keys, width.unwrap_or(config.intermediate_size))?;
    Ok(ArchSpec { config, options })
}

pub(super) fn moe_from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    if !keys.take("use_expert_bias")?.unwrap_or(true) {
        return Err(keys.unsupported("`use_expert_bias` is off, which is not supported"));
    }
    let ArchSpec { mut config, options } = hf_spec(keys)?;
    let dense = keys.take("num_dense_layers")?.unwrap_or(2);
    keys.default("first_k_dense_replace", dense);
    keys.default("n_shared_experts", 0);
    let scoring = RouterScoring::Sigmoid { groups: 1, kept: 1 };
    config.mixture = Some(keys.later_mixture(&config, scoring)?);
    Ok(ArchSpec { config, options })
}

/// Reads what both have.
fn hf_spec(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    keys.default("rope_theta", THETA);
    let eps = keys.take::<f32>("norm_eps")?;
    keys.default("rms_norm_eps", eps.unwrap_or(EPSILON));
    let tied = keys.take("tie_embedding")?;
    let mut config = keys.decoder(true)?;
    config.tied_embeddings = tied.unwrap_or(config.tied_embeddings);
    let with_attention = keys.take::<Vec<usize>>("full_attn_idxs")?;
    let by_default = |layer| with_attention.as_ref().is_some_and(|with| !with.contains(&layer));
    let layers = keys.recurrent_layers(config.layers, &["conv"], by_default)?;
    let taps = keys.take("conv_L_cache")?.unwrap_or(3);
    Ok(spec(config, taps, layers))
}

/// The MLP's width, of which a config may give the one before it is made smaller and round.
fn adjusted(keys: &mut HfConfigKeys, width: usize) -> Result<usize> {
    let multiple = keys.take("block_multiple_of")?.unwrap_or(256).max(1);
    let multiplier: f64 = keys.take("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    if !keys.take("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(width);
    }
    Ok((((2 * width / 3) as f64 * multiplier) as usize).next_multiple_of(multiple))
}

//! Qwen 3.5: Llama's block, where three of four layers have the gated delta rule in place of
//! attention, and attention has a gate on its results. Larger ones have experts in every layer,
//! with one that computes every token. Qwen Team 2026.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::qwen2_moe;
use crate::config::{MixtureConfig, Recurrent, RecurrentKind};
use crate::spec::{ArchSpec, LayerOptions, NameMap, Presence, QkNorms};
use crate::{ModelConfig, Result};
use cresset_kernels::activation::Activation;
use cresset_kernels::recurrence::{DeltaShape, HeadMap};
use cresset_kernels::rope::RopeStyle;

const OPTIONS: LayerOptions = LayerOptions {
    qk_norm: QkNorms::EachHead,
    attention_gate: true,
    names: NameMap {
        gguf: &[
            ("post_attention_layernorm", "post_attention_norm"),
            ("linear_attn.in_proj_qkv", "attn_qkv"),
            ("linear_attn.in_proj_z", "attn_gate"),
            ("linear_attn.in_proj_b", "ssm_beta"),
            ("linear_attn.in_proj_a", "ssm_alpha"),
            ("linear_attn.in_proj_qkvz", "ssm_in"),
            ("linear_attn.in_proj_ba", "ssm_ba"),
            ("linear_attn.conv1d", "ssm_conv1d"),
            ("linear_attn.dt_bias", "ssm_dt.bias"),
            ("linear_attn.A_log", "ssm_a"),
            ("linear_attn.norm", "ssm_norm"),
            ("linear_attn.out_proj", "ssm_out"),
        ],
        ..NameMap::USUAL
    },
    ..LayerOptions::plain(RopeStyle::Neox)
};

/// One layer of this number has attention, if a config does not list them.
const INTERVAL: usize = 4;
/// The part of each head that is rotated, if a config does not say it.
const ROTATED: f32 = 0.25;

fn recurrent(shape: DeltaShape, taps: usize, layers: Vec<bool>) -> Option<Recurrent> {
    let kind = RecurrentKind::DeltaRule { shape, taps };
    layers.contains(&true).then_some(Recurrent { kind, layers })
}

fn every(interval: usize, layers: usize) -> Vec<bool> {
    (0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect()
}

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    gguf_spec(keys, HeadMap::Tiled)
}

/// Reads a file that has value heads in this order.
pub(super) fn gguf_spec(keys: &mut GgufConfigKeys, head_map: HeadMap) -> Result<ArchSpec> {
    let mut config = keys.decoder()?;
    let further_layers = keys.further_layers(&mut config)?;
    // The positions of text are the same along all axes.
    keys.sections("rope.dimension_sections")?;
    let shape = delta_shape(keys, head_map)?;
    let listed = keys.flags("attention.recurrent_layers")?;
    let interval = keys.size("full_attention_interval")?.unwrap_or(INTERVAL);
    let mut layers = listed.unwrap_or_else(|| every(interval, config.layers));
    layers.truncate(config.layers);
    config.recurrent = recurrent(shape, keys.needed("ssm.conv_kernel")?, layers);
    Ok(ArchSpec { config, options: LayerOptions { further_layers, ..OPTIONS } })
}

pub(super) fn moe_from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let ArchSpec { mut config, options } = from_gguf(keys)?;
    config.mixture = Some(keys.mixture(&config, true)?);
    Ok(ArchSpec { config, options })
}

fn delta_shape(keys: &mut GgufConfigKeys, head_map: HeadMap) -> Result<DeltaShape> {
    let value_heads = keys.needed("ssm.time_step_rank")?;
    Ok(DeltaShape {
        key_heads: keys.needed("ssm.group_count")?,
        value_heads,
        key_dim: keys.needed("ssm.state_size")?,
        value_dim: keys.needed("ssm.inner_size")? / value_heads,
        head_map,
    })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let further_layers = keys.take("mtp_num_hidden_layers")?.unwrap_or(0);
    // A head with an embedding of its own is not used.
    let apart = keys.take("mtp_use_dedicated_embeddings")?.unwrap_or(false);
    let further_layers = if apart { 0 } else { further_layers };
    keys.take::<Vec<usize>>("mtp_layer_types")?;
    if keys.take::<Vec<usize>>("mlp_only_layers")?.is_some_and(|layers| !layers.is_empty()) {
        return Err(keys.unsupported("`mlp_only_layers` names layers of a model with experts"));
    }
    let ArchSpec { config, options } = hf_spec(keys)?;
    Ok(ArchSpec { config, options: LayerOptions { further_layers, ..options } })
}

/// Reads all but the feed-forward blocks and the head that guesses tokens.
pub(super) fn hf_spec(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    if !keys.take("attn_output_gate")?.unwrap_or(true) {
        return Err(keys.unsupported("`attn_output_gate` is off, which is not supported"));
    }
    if keys.take::<String>("mamba_ssm_dtype")?.is_some_and(|dtype| dtype != "float32") {
        return Err(keys.unsupported("`mamba_ssm_dtype` is not float32"));
    }
    let activation = keys.activation("hidden_act", Activation::Silu)?;
    let bias = Presence::when(keys.flag("attention_bias")?);
    let (qkv_bias, output_bias) = (bias, bias);
    let mut config = decoder(keys)?;
    let shape = DeltaShape {
        key_heads: keys.required("linear_num_key_heads")?,
        value_heads: keys.required("linear_num_value_heads")?,
        key_dim: keys.required("linear_key_head_dim")?,
        value_dim: keys.required("linear_value_head_dim")?,
        head_map: HeadMap::Grouped,
    };
    let taps = keys.required("linear_conv_kernel_dim")?;
    let interval = keys.take("full_attention_interval")?.unwrap_or(INTERVAL).max(1);
    let by_default = |layer: usize| !(layer + 1).is_multiple_of(interval);
    let layers = keys.recurrent_layers(config.layers, &["linear_attention"], by_default)?;
    config.recurrent = recurrent(shape, taps, layers);
    let names = NameMap { norms_less_one: true, ..OPTIONS.names };
    let options = LayerOptions { activation, qkv_bias, output_bias, names, ..OPTIONS };
    Ok(ArchSpec { config, options })
}

/// No layer has a dense MLP, whose width the config therefore lacks.
pub(super) fn moe_from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let width: usize = keys.required("moe_intermediate_size")?;
    keys.default("intermediate_size", width);
    let ArchSpec { mut config, options } = from_hf(keys)?;
    let shared = Some(qwen2_moe::shared_expert(keys)?);
    config.mixture = Some(MixtureConfig { shared, ..keys.mixture(width, config.layers)? });
    Ok(ArchSpec { config, options })
}

fn decoder(keys: &mut HfConfigKeys) -> Result<ModelConfig> {
    keys.leave_out_sections()?;
    let part = keys.rotated_part(ROTATED)?;
    keys.decoder_with(false, part)
}

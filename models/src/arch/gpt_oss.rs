//! GPT-OSS: Llama's block with sinks and biases in attention, a window in every other layer, and a
//! mixture of experts with biases and a clamped activation. OpenAI 2025, "gpt-oss model card".

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use crate::config::{RopeScaling, Sliding};
use crate::spec::{ArchSpec, FusedExperts, LayerOptions, NameMap, Presence};
use crate::{ModelConfig, Result};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;
use serde_json::json;

const OPTIONS: LayerOptions = LayerOptions {
    activation: Activation::ClampedSwiglu { alpha: ALPHA, limit: LIMIT },
    qkv_bias: Presence::Always,
    output_bias: Presence::Always,
    sinks: true,
    expert_bias: true,
    names: NameMap {
        gguf: &[
            ("post_attention_layernorm", "post_attention_norm"),
            ("self_attn.sinks", "attn_sinks.weight"),
        ],
        hf: &[
            ("mlp.gate.", "mlp.router."),
            ("experts.gate_up_proj.bias", "experts.gate_up_proj_bias"),
            ("experts.down_proj.bias", "experts.down_proj_bias"),
        ],
        ..NameMap::USUAL
    },
    ..LayerOptions::plain(RopeStyle::Neox)
};

/// The values of settings that a file does not have. Its layers take turns: one with a window, one
/// without.
const ALPHA: f32 = 1.702;
const LIMIT: f32 = 7.0;
const WINDOW: usize = 128;
const THETA: f32 = 150_000.0;

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = keys.decoder()?;
    let window = keys.needed("attention.sliding_window")?;
    let layers = keys.sliding_layers(config.layers, 2)?;
    config.sliding = Some(Sliding { window, layers, rope: None, heads: None });
    config.mixture = Some(keys.mixture(&config, true)?);
    // GGUF has no key for this.
    if let RopeScaling::Yarn(yarn) = &mut config.rope.scaling {
        yarn.truncate = false;
    }
    Ok(ArchSpec { config, options: OPTIONS })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    if keys.quantisation() == Some("mxfp4") {
        // Each tensor tells by its name whether it is.
        keys.take::<serde_json::Value>("quantization_config")?;
    }
    let mut config = decoder(keys)?;
    let window = keys.window(WINDOW)?;
    config.sliding = keys.sliding(&config, window, |layer| layer.is_multiple_of(2))?;
    config.mixture = Some(keys.mixture(config.intermediate_size, config.layers)?);
    let bias = Presence::when(keys.take("attention_bias")?.unwrap_or(true));
    // The experts' own activation is always the clamped one.
    keys.activation("hidden_act", Activation::Silu)?;
    let options = LayerOptions {
        activation: activation(keys)?,
        qkv_bias: bias,
        output_bias: bias,
        fused_experts: FusedExperts::InterleavedTransposed,
        ..OPTIONS
    };
    Ok(ArchSpec { config, options })
}

fn activation(keys: &mut HfConfigKeys) -> Result<Activation> {
    let alpha = keys.take("swiglu_alpha")?.unwrap_or(ALPHA);
    let limit = keys.take("swiglu_limit")?.unwrap_or(LIMIT);
    if !(alpha > 0.0 && limit > 0.0) {
        return Err(keys.bad("`swiglu_alpha` and `swiglu_limit` must be positive"));
    }
    Ok(Activation::ClampedSwiglu { alpha, limit })
}

fn decoder(keys: &mut HfConfigKeys) -> Result<ModelConfig> {
    keys.default("rope_theta", THETA);
    keys.default(
        "rope_parameters",
        json!({
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": false,
        }),
    );
    keys.take_repeated("experts_per_token", "num_experts_per_tok")?;
    // The length that the rotation's settings give, too.
    keys.take::<usize>("initial_context_length")?;
    keys.decoder(false)
}

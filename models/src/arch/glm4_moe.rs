//! GLM-4.5 and 4.6: Llama's block with heads rotated in part, and behind the first layers a mixture
//! of experts that is routed by sigmoids and biases, with one expert that computes every token.
//! GLM-4.5 Team 2025.

use super::{ArchSpec, Architecture, LayerOptions, QkNorms, gguf_config, hf_config};
use crate::config::{MixtureConfig, RouterScoring, SharedConfig};
use crate::loader::tensors::{NameMap, Presence};
use crate::{ModelConfig, Result};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

pub(super) const GLM4_MOE: Architecture =
    Architecture { gguf: Some(("glm4moe", from_gguf)), hf: ("glm4_moe", from_hf) };

const OPTIONS: LayerOptions = LayerOptions {
    names: NameMap {
        gguf: &[
            ("post_attention_layernorm", "post_attention_norm"),
            ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
        ],
        hf: &[("mlp.shared_expert.", "mlp.shared_experts.")],
        ..NameMap::USUAL
    },
    ..LayerOptions::plain(RopeStyle::Neox)
};

/// The values of settings that a config does not have.
const EPSILON: f32 = 1e-5;
const ROTATED: f32 = 0.5;

fn from_gguf(keys: &mut gguf_config::GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = keys.decoder()?;
    let further_layers = keys.further_layers(&mut config)?;
    config.mixture = Some(keys.sigmoid_mixture(&config)?);
    let qk_norm = keys.has_tensor_ending(".attn_q_norm.weight");
    let qk_norm = if qk_norm { QkNorms::EachHead } else { QkNorms::None };
    let qkv_bias = Presence::Optional;
    Ok(ArchSpec { config, options: LayerOptions { qkv_bias, qk_norm, further_layers, ..OPTIONS } })
}

fn from_hf(keys: &mut hf_config::HfConfigKeys) -> Result<ArchSpec> {
    keys.default("rms_norm_eps", EPSILON);
    let part = keys.rotated_part(ROTATED)?;
    let mut config = keys.decoder_with(false, part)?;
    config.mixture = Some(mixture(keys, &config)?);
    let qk_norm = keys.flag("use_qk_norm")?;
    let options = LayerOptions {
        activation: keys.activation("hidden_act", Activation::Silu)?,
        qk_norm: if qk_norm { QkNorms::EachHead } else { QkNorms::None },
        qkv_bias: Presence::when(keys.flag("attention_bias")?),
        further_layers: keys.take("num_nextn_predict_layers")?.unwrap_or(0),
        ..OPTIONS
    };
    Ok(ArchSpec { config, options })
}

/// Reads the settings of experts behind the first layers.
fn mixture(keys: &mut hf_config::HfConfigKeys, config: &ModelConfig) -> Result<MixtureConfig> {
    let width: usize = keys.required("moe_intermediate_size")?;
    let dense = keys.take("first_k_dense_replace")?.unwrap_or(1);
    let groups = keys.take("n_group")?.unwrap_or(1);
    let kept = keys.take("topk_group")?.unwrap_or(1);
    let shared: usize = keys.take("n_shared_experts")?.unwrap_or(1);
    Ok(MixtureConfig {
        scoring: RouterScoring::Sigmoid { groups, kept },
        normalise: keys.take("norm_topk_prob")?.unwrap_or(true),
        scale: keys.take("routed_scaling_factor")?.unwrap_or(1.0),
        shared: (shared > 0).then_some(SharedConfig { width: shared * width, gated: false }),
        layers: (0..config.layers).map(|layer| layer >= dense).collect(),
        ..keys.mixture(width, config.layers)?
    })
}

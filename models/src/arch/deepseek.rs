//! DeepSeek-V2, V3 and R1: Llama's block with latent attention, and behind the first layers a
//! mixture of experts with one that computes every token. V2 routes by the softmax and V3 by
//! sigmoids and biases, both within the best groups of experts. DeepSeek-AI 2024, "DeepSeek-V2" and
//! "DeepSeek-V3".

use super::gguf_config::{GgufConfigKeys, SIGMOID, SOFTMAX};
use super::hf_keys::HfConfigKeys;
use super::latent;
use crate::config::{MixtureConfig, RouterScoring};
use crate::spec::{ArchSpec, LayerOptions, NameMap, Presence};
use crate::{ModelConfig, Result};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

pub(super) const OPTIONS: LayerOptions = LayerOptions {
    names: NameMap {
        gguf: &[("mlp.gate.e_score_correction_bias", "exp_probs_b.bias")],
        hf: &[("mlp.shared_expert.", "mlp.shared_experts.")],
        ..NameMap::USUAL
    },
    ..LayerOptions::plain(RopeStyle::Interleaved)
};

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = latent::from_gguf(keys)?;
    let further_layers = keys.further_layers(&mut config)?;
    let function = routing_function(keys, &config)?;
    config.mixture = Some(keys.later_mixture(&config, function, &[SOFTMAX, SIGMOID], false)?);
    Ok(ArchSpec { config, options: LayerOptions { further_layers, ..OPTIONS } })
}

/// Files of V2 were made before there was a key for this, and some of GLM-4.7-Flash lack it too.
fn routing_function(keys: &mut GgufConfigKeys, config: &ModelConfig) -> Result<usize> {
    if let Some(function) = keys.size("expert_gating_func")? {
        return Ok(function);
    }
    let is_glm = [47, 48].contains(&config.layers) && config.vocab_size == 154_880;
    if is_glm {
        Ok(SIGMOID)
    } else if keys.has_tensor_ending(".exp_probs_b.bias") {
        Err(keys.unsupported(
            "the file does not say how experts are routed (expert_gating_func): fetch a newer one, \
             or convert the checkpoint with `scoring_func` in its config.json",
        ))
    } else {
        Ok(SOFTMAX)
    }
}

pub(super) fn v2_from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    keys.default("first_k_dense_replace", 0);
    keys.default("n_shared_experts", 2);
    keys.only("scoring_func", "softmax")?;
    keys.only("norm_topk_prob", false)?;
    let [groups, kept] = keys.expert_groups()?;
    let scoring = match keys.take::<String>("topk_method")?.as_deref() {
        None | Some("greedy") => RouterScoring::Softmax,
        Some("group_limited_greedy") => RouterScoring::GroupedSoftmax { groups, kept },
        Some(other) => {
            return Err(keys.unsupported(&format!("`topk_method` {other:?} is not supported")));
        }
    };
    from_hf(keys, |keys, config| {
        Ok(MixtureConfig { normalise: false, ..keys.later_mixture(config, scoring)? })
    })
}

pub(super) fn v3_from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    for (key, value) in [("first_k_dense_replace", 3), ("n_group", 8), ("topk_group", 4)] {
        keys.default(key, value);
    }
    keys.default("routed_scaling_factor", 2.5);
    from_hf(keys, sigmoid_mixture)
}

/// Reads the settings of experts that are routed by sigmoids and biases.
pub(super) fn sigmoid_mixture(
    keys: &mut HfConfigKeys,
    config: &ModelConfig,
) -> Result<MixtureConfig> {
    keys.only("scoring_func", "sigmoid")?;
    keys.only("topk_method", "noaux_tc")?;
    let [groups, kept] = keys.expert_groups()?;
    keys.later_mixture(config, RouterScoring::Sigmoid { groups, kept })
}

/// Reads what all these families have, with the experts that `mixture` reads.
pub(super) fn from_hf(
    keys: &mut HfConfigKeys,
    mixture: impl FnOnce(&mut HfConfigKeys, &ModelConfig) -> Result<MixtureConfig>,
) -> Result<ArchSpec> {
    let mut config = latent::from_hf(keys)?;
    keys.only("moe_layer_freq", 1)?;
    config.mixture = Some(mixture(keys, &config)?);
    let in_turn = keys.take("rope_interleave")?.unwrap_or(true);
    let bias = Presence::when(keys.flag("attention_bias")?);
    let options = LayerOptions {
        qkv_bias: bias,
        output_bias: bias,
        rope_style: if in_turn { RopeStyle::Interleaved } else { RopeStyle::Neox },
        activation: keys.activation("hidden_act", Activation::Silu)?,
        further_layers: keys.take("num_nextn_predict_layers")?.unwrap_or(0),
        ..OPTIONS
    };
    Ok(ArchSpec { config, options })
}

//! GLM-4.5 and 4.6: Llama's block with heads rotated in part, and behind the first layers a mixture
//! of experts that is routed by sigmoids and biases, with one expert that computes every token.
//! GLM-4.5 Team 2025.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use crate::Result;
use crate::config::RouterScoring;
use crate::spec::{ArchSpec, LayerOptions, NameMap, Presence, QkNorms};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

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

/// The part of each head that is rotated, if a config does not say it.
const ROTATED: f32 = 0.5;

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = keys.decoder()?;
    let further_layers = keys.further_layers(&mut config)?;
    config.mixture = Some(keys.sigmoid_mixture(&config)?);
    let qk_norm = keys.has_tensor_ending(".attn_q_norm.weight");
    let qk_norm = if qk_norm { QkNorms::EachHead } else { QkNorms::None };
    let qkv_bias = Presence::Optional;
    Ok(ArchSpec { config, options: LayerOptions { qkv_bias, qk_norm, further_layers, ..OPTIONS } })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let part = keys.rotated_part(ROTATED)?;
    let mut config = keys.decoder_with(false, part)?;
    let [groups, kept] = keys.expert_groups()?;
    let scoring = RouterScoring::Sigmoid { groups, kept };
    config.mixture = Some(keys.later_mixture(&config, scoring)?);
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

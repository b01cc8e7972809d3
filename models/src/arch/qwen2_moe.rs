//! Qwen 1.5 and 2 with experts: Qwen 2's attention, and a mixture of experts with one that computes
//! every token. Qwen Team 2024.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::{qwen2, qwen3_moe};
use crate::Result;
use crate::config::{MixtureConfig, SharedConfig};
use crate::spec::{ArchSpec, LayerOptions, Presence};
use cresset_kernels::activation::Activation;

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = keys.decoder()?;
    let mixture = keys.mixture(&config, false)?;
    let shared =
        mixture.shared.or(Some(SharedConfig { width: config.intermediate_size, gated: true }));
    config.mixture = Some(MixtureConfig { shared, ..mixture });
    let options = LayerOptions { qkv_bias: Presence::Optional, ..qwen2::OPTIONS };
    Ok(ArchSpec { config, options })
}

/// A window, which no release has, would be in every other layer below `max_window_layers`.
pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let biased = keys.take("qkv_bias")?.unwrap_or(true);
    let options = LayerOptions {
        activation: keys.activation("hidden_act", Activation::Silu)?,
        qkv_bias: Presence::when(biased),
        ..qwen2::OPTIONS
    };
    let mut config = keys.decoder(false)?;
    let window = keys.switched_window()?;
    let windowed = keys.take("max_window_layers")?.unwrap_or(28);
    let has_window = |layer: usize| layer.is_multiple_of(2) && layer < windowed;
    config.sliding = keys.sliding(&config, window, has_window)?;
    let shared = Some(shared_expert(keys)?);
    config.mixture = Some(MixtureConfig { shared, ..qwen3_moe::mixture(keys, &config)? });
    Ok(ArchSpec { config, options })
}

/// Reads the width of the expert that computes every token.
pub(super) fn shared_expert(keys: &mut HfConfigKeys) -> Result<SharedConfig> {
    Ok(SharedConfig { width: keys.required("shared_expert_intermediate_size")?, gated: true })
}

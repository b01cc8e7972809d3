//! Qwen 2 and 2.5: Llama's block with biases on Q, K and V. Yang et al. 2024.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use crate::spec::{ArchSpec, LayerOptions, Presence};
use crate::{ModelConfig, Result};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

pub(super) const OPTIONS: LayerOptions =
    LayerOptions { qkv_bias: Presence::Always, ..LayerOptions::plain(RopeStyle::Neox) };

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    Ok(ArchSpec { config: keys.decoder()?, options: OPTIONS })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let options =
        LayerOptions { activation: keys.activation("hidden_act", Activation::Silu)?, ..OPTIONS };
    Ok(ArchSpec { config: decoder(keys)?, options })
}

/// Qwen's window applies to the layers from `max_window_layers` on, if `use_sliding_window` turns
/// it on.
pub(super) fn decoder(keys: &mut HfConfigKeys) -> Result<ModelConfig> {
    let mut config = keys.decoder(false)?;
    let window = keys.switched_window()?;
    let full = keys.take("max_window_layers")?.unwrap_or(28);
    config.sliding = keys.sliding(&config, window, |layer| layer >= full)?;
    Ok(config)
}

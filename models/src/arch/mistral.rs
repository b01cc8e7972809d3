//! Mistral: Llama's block with a sliding window in every layer, or none. Jiang et al. 2023.
//! Ministral: the same with a window in some layers.

use super::{ArchSpec, Architecture, LayerOptions, hf_config};
use crate::Result;
use crate::config::Sliding;
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

/// Its GGUF files say "llama".
pub(super) const MISTRAL: Architecture = Architecture { gguf: None, hf: ("mistral", from_hf) };

/// Ministral has layers without a window. Its releases say so one by one.
pub(super) const MINISTRAL: Architecture =
    Architecture { gguf: None, hf: ("ministral", ministral_from_hf) };

/// The window if the config has no `sliding_window`.
const WINDOW: usize = 4096;

fn from_hf(keys: &mut hf_config::HfConfigKeys) -> Result<ArchSpec> {
    let mut config = keys.decoder(false)?;
    config.sliding = keys.window(WINDOW)?.map(|window| Sliding::everywhere(window, config.layers));
    let options = LayerOptions {
        activation: keys.activation("hidden_act", Activation::Silu)?,
        ..LayerOptions::plain(RopeStyle::Neox)
    };
    Ok(ArchSpec { config, options })
}

fn ministral_from_hf(keys: &mut hf_config::HfConfigKeys) -> Result<ArchSpec> {
    let mut spec = from_hf(keys)?;
    let window = spec.config.sliding.as_ref().map(|sliding| sliding.window);
    spec.config.sliding = keys.sliding(&spec.config, window, |_| true)?;
    Ok(spec)
}

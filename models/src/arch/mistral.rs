//! Mistral: Llama's block with a sliding window in every layer, or none. Jiang et al. 2023.

use super::{ArchSpec, Architecture, LayerOptions, hf_config};
use crate::Result;
use crate::config::Sliding;
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

/// Its GGUF files say "llama".
pub(super) const MISTRAL: Architecture = Architecture { gguf: None, hf: ("mistral", from_hf) };

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

//! Mistral: Llama's block with a sliding window in every layer, or none. Jiang et al. 2023.

use super::{Architecture, Blueprint, Recipe, hf_config};
use crate::Result;
use crate::config::Sliding;
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

/// Its GGUF files say "llama".
pub const MISTRAL: Architecture = Architecture { gguf: None, hf: ("mistral", from_hf) };

/// Where the config has no `sliding_window`.
const WINDOW: usize = 4096;

fn from_hf(keys: &mut hf_config::Keys) -> Result<Blueprint> {
    let mut config = keys.decoder(false)?;
    config.sliding = keys.window(WINDOW)?.map(|window| Sliding::everywhere(window, config.layers));
    let recipe = Recipe {
        activation: keys.activation("hidden_act", Activation::Silu)?,
        ..Recipe::plain(RopeStyle::Neox)
    };
    Ok(Blueprint { config, recipe })
}

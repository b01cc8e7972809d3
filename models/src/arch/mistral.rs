//! Mistral: Llama's block with an optional sliding window. Jiang et al. 2023.

use super::hf_config::HfConfig;
use super::{Architecture, Blueprint, Recipe};
use cresset_kernels::rope::RopeStyle;

/// Its GGUF files say "llama".
pub const MISTRAL: Architecture = Architecture { name: "mistral", gguf: None, hf: from_hf };

fn from_hf(config: &HfConfig) -> Result<Blueprint, String> {
    if config.attention_bias || config.mlp_bias {
        return Err("biases are not part of this architecture".into());
    }
    Ok(Blueprint { config: config.decoder()?, recipe: Recipe::plain(RopeStyle::Neox) })
}

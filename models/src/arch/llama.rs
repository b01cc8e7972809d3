//! Llama 2 and 3, and models of their shape (SmolLM2). Touvron et al. 2023; Grattafiori et al. 2024.

use super::gguf_config::Keys;
use super::hf_config::HfConfig;
use super::{Architecture, Blueprint, Recipe};
use crate::Result;
use crate::loader::tensors::Presence;
use cresset_kernels::rope::RopeStyle;

pub const LLAMA: Architecture = Architecture { name: "llama", gguf: Some(from_gguf), hf: from_hf };

/// GGUF files of this name hold Mistral too; the converter permutes the rows of Q and K for interleaved rotation.
fn from_gguf(keys: &mut Keys) -> Result<Blueprint> {
    let recipe = Recipe {
        qkv_bias: Presence::Optional,
        output_bias: Presence::Optional,
        mlp_bias: Presence::Optional,
        ..Recipe::plain(RopeStyle::Interleaved)
    };
    Ok(Blueprint { config: keys.decoder()?, recipe })
}

fn from_hf(config: &HfConfig) -> Result<Blueprint, String> {
    if config.sliding_window.is_some() {
        return Err("`sliding_window` is not part of this architecture".into());
    }
    let present = |flag| if flag { Presence::Always } else { Presence::Never };
    let recipe = Recipe {
        qkv_bias: present(config.attention_bias),
        output_bias: present(config.attention_bias),
        mlp_bias: present(config.mlp_bias),
        ..Recipe::plain(RopeStyle::Neox)
    };
    Ok(Blueprint { config: config.decoder()?, recipe })
}

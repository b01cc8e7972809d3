//! Llama 2 and 3, and models of their shape (SmolLM2). Touvron et al. 2023; Grattafiori et al.
//! 2024.

use super::{Architecture, Blueprint, Recipe, gguf_config, hf_config};
use crate::Result;
use crate::config::Sliding;
use crate::loader::tensors::Presence;
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

pub const LLAMA: Architecture =
    Architecture { gguf: Some(("llama", from_gguf)), hf: ("llama", from_hf) };

/// GGUF files of this name hold Mistral too; the converter permutes the rows of Q and K for
/// interleaved rotation.
fn from_gguf(keys: &mut gguf_config::Keys) -> Result<Blueprint> {
    let mut config = keys.decoder()?;
    config.sliding = keys
        .size("attention.sliding_window")?
        .map(|window| Sliding::everywhere(window, config.layers));
    let recipe = Recipe {
        qkv_bias: Presence::Optional,
        output_bias: Presence::Optional,
        mlp_bias: Presence::Optional,
        ..Recipe::plain(RopeStyle::Interleaved)
    };
    Ok(Blueprint { config, recipe })
}

fn from_hf(keys: &mut hf_config::Keys) -> Result<Blueprint> {
    let attention_bias = Presence::when(keys.flag("attention_bias")?);
    let recipe = Recipe {
        activation: keys.activation("hidden_act", Activation::Silu)?,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        mlp_bias: Presence::when(keys.flag("mlp_bias")?),
        ..Recipe::plain(RopeStyle::Neox)
    };
    Ok(Blueprint { config: keys.decoder(false)?, recipe })
}

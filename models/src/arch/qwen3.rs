//! Qwen 3: norms on the heads of Q and K, and their size set apart from the hidden size. Yang et
//! al. 2025.

use super::{Architecture, Blueprint, Recipe, gguf_config, hf_config, qwen2};
use crate::Result;
use crate::loader::tensors::Presence;
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

pub const QWEN3: Architecture =
    Architecture { gguf: Some(("qwen3", from_gguf)), hf: ("qwen3", from_hf) };

const RECIPE: Recipe = Recipe { qk_norm: true, ..Recipe::plain(RopeStyle::Neox) };

fn from_gguf(keys: &mut gguf_config::Keys) -> Result<Blueprint> {
    let (qkv_bias, output_bias) = (Presence::Optional, Presence::Optional);
    Ok(Blueprint { config: keys.decoder()?, recipe: Recipe { qkv_bias, output_bias, ..RECIPE } })
}

fn from_hf(keys: &mut hf_config::Keys) -> Result<Blueprint> {
    let bias = Presence::when(keys.flag("attention_bias")?);
    let recipe = Recipe {
        activation: keys.activation("hidden_act", Activation::Silu)?,
        qkv_bias: bias,
        output_bias: bias,
        ..RECIPE
    };
    Ok(Blueprint { config: qwen2::decoder(keys)?, recipe })
}

//! Gemma 2: norms on both sides of each sub-layer, soft caps, every other layer with a sliding
//! window. Riviere et al. 2024.

use super::{Architecture, Blueprint, Recipe, gguf_config, hf_config};
use crate::config::Sliding;
use crate::loader::tensors::{Presence, Spelling};
use crate::{ModelConfig, Result};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

pub const GEMMA2: Architecture =
    Architecture { gguf: Some(("gemma2", from_gguf)), hf: ("gemma2", from_hf) };

/// Of Gemma 2 and 3. The converter to GGUF adds the one to the norms' weights.
pub(super) const RECIPE: Recipe = Recipe {
    activation: Activation::GeluTanh,
    sub_layer_norms: true,
    spelling: Spelling {
        gguf: &[("post_attention_layernorm", "post_attention_norm")],
        norms_less_one: false,
    },
    ..Recipe::plain(RopeStyle::Neox)
};

const PATTERN: usize = 2;
const WINDOW: usize = 4096;
const LAYERS_OF_27B: usize = 46;

fn from_gguf(keys: &mut gguf_config::Keys) -> Result<Blueprint> {
    let mut config = gguf_decoder(keys, LAYERS_OF_27B)?;
    let window = keys.size("attention.sliding_window")?.unwrap_or(WINDOW);
    let layers = keys.sliding_layers(config.layers, PATTERN)?;
    config.sliding = Some(Sliding { window, layers, rope: None });
    config.attention_softcap = keys.float("attn_logit_softcapping")?;
    Ok(Blueprint { config, recipe: RECIPE })
}

/// GGUF does not say the attention's scale: of all sizes, only the largest has one that is not the
/// heads'.
pub(super) fn gguf_decoder(
    keys: &mut gguf_config::Keys,
    layers_of_27b: usize,
) -> Result<ModelConfig> {
    let mut config = keys.decoder()?;
    if config.layers == layers_of_27b {
        config.attention_scale = 1.0 / (config.hidden_size as f32 / config.heads as f32).sqrt();
    }
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    config.logits_softcap = keys.float("final_logit_softcapping")?;
    Ok(config)
}

fn from_hf(keys: &mut hf_config::Keys) -> Result<Blueprint> {
    let (mut config, recipe) = hf_decoder(keys)?;
    config.attention_softcap = keys.take("attn_logit_softcapping")?;
    let window = keys.window(WINDOW)?;
    config.sliding = keys.sliding(&config, window, |layer| (layer + 1) % PATTERN != 0)?;
    Ok(Blueprint { config, recipe })
}

/// What Gemma 2 and 3 have in common.
pub(super) fn hf_decoder(keys: &mut hf_config::Keys) -> Result<(ModelConfig, Recipe)> {
    // Configs of the first models name the activation in a key that the reference ignores.
    keys.take::<String>("hidden_act")?;
    let bias = Presence::when(keys.flag("attention_bias")?);
    let recipe = Recipe {
        activation: keys.activation("hidden_activation", RECIPE.activation)?,
        qkv_bias: bias,
        output_bias: bias,
        spelling: Spelling { norms_less_one: true, ..RECIPE.spelling },
        ..RECIPE
    };
    let mut config = keys.decoder(true)?;
    let scalar: f32 = keys.take("query_pre_attn_scalar")?.unwrap_or(256.0);
    config.attention_scale = 1.0 / scalar.sqrt();
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    config.logits_softcap = keys.take("final_logit_softcapping")?;
    Ok((config, recipe))
}

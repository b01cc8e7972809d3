//! Mistral: Llama's block with a sliding window in every layer, or none. Jiang et al. 2023.
//! Ministral: the same with a window in some layers. Ministral 3: without one, with queries that
//! grow with their positions. Mistral AI 2025.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::{latent, llama};
use crate::config::{QueryGrowth, RopeScaling, Sliding};
use crate::spec::{ArchSpec, LayerOptions};
use crate::{ModelConfig, Result};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

/// The `beta` of [`QueryGrowth`] if a file does not give it. Some that were converted from Hugging
/// Face's do not.
pub(super) const BETA: f32 = 0.1;

/// The window if the config has no `sliding_window`.
const WINDOW: usize = 4096;

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let mut config = keys.decoder(false)?;
    config.sliding = keys.window(WINDOW)?.map(|window| Sliding::everywhere(window, config.layers));
    let options = LayerOptions {
        activation: keys.activation("hidden_act", Activation::Silu)?,
        ..LayerOptions::plain(RopeStyle::Neox)
    };
    Ok(ArchSpec { config, options })
}

/// Releases say of each layer whether it has a window.
pub(super) fn ministral_from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let mut spec = from_hf(keys)?;
    let window = spec.config.sliding.as_ref().map(|sliding| sliding.window);
    spec.config.sliding = keys.sliding(&spec.config, window, |_| true)?;
    Ok(spec)
}

pub(super) fn ministral3_from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let beta = hf_beta(keys)?;
    let window = keys.take("sliding_window")?;
    let mut spec = llama::from_hf(keys)?;
    spec.config.sliding = window.map(|window| Sliding::everywhere(window, spec.config.layers));
    grow(&mut spec.config, beta).map_err(|what| keys.unsupported(what))?;
    Ok(spec)
}

/// GGUF files of this name hold the text of Mistral Small 3 too, whose queries do not grow.
pub(super) fn ministral3_from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let beta = keys.float("attention.temperature_scale")?;
    let multiplier = keys.float("rope.scaling.yarn_log_multiplier")?;
    let mut spec = llama::from_gguf(keys)?;
    latent::sharpen(&mut spec.config.rope.scaling, multiplier);
    if let Some(beta) = beta {
        grow(&mut spec.config, beta).map_err(|what| keys.unsupported(what))?;
    }
    Ok(spec)
}

/// Takes the `beta` of [`QueryGrowth`] from the settings of the rotation, in either layout.
pub(super) fn hf_beta(keys: &mut HfConfigKeys) -> Result<f32> {
    let mut number = |key: &str| -> Result<Option<f32>> {
        let newer = keys.take_inside("rope_parameters", key)?;
        Ok(newer.or(keys.take_inside("rope_scaling", key)?))
    };
    // The length that the config itself gives, too.
    number("max_position_embeddings")?;
    Ok(number("llama_4_scaling_beta")?.unwrap_or(BETA))
}

/// Lets queries grow with each multiple of the length that the model was first trained for. Says
/// what is not supported.
pub(super) fn grow(config: &mut ModelConfig, beta: f32) -> std::result::Result<(), &'static str> {
    let RopeScaling::Yarn(yarn) = &config.rope.scaling else {
        return Err("the rotation is not scaled by YaRN (rope_parameters), as this family's is");
    };
    config.query_growth = Some(QueryGrowth { beta, length: yarn.original_max_positions });
    Ok(())
}

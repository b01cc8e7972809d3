//! Mistral Small 4: DeepSeek-V2's layer, whose experts are routed by a softmax and weighed among
//! themselves, and whose queries grow with their positions. Mistral AI 2026.

use super::gguf_config::{self, SOFTMAX};
use super::{ArchSpec, Architecture, deepseek, hf_config, latent};
use crate::config::{QueryGrowth, RopeScaling, RouterScoring};
use crate::{ModelConfig, Result};

pub(super) const MISTRAL4: Architecture =
    Architecture { gguf: Some(("mistral4", from_gguf)), hf: ("mistral4", from_hf) };

/// How queries grow in files that do not say so, such as those that were converted from
/// Hugging Face's.
const BETA: f32 = 0.1;

fn from_gguf(keys: &mut gguf_config::GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = latent::from_gguf(keys)?;
    let beta = keys.float("attention.temperature_scale")?.unwrap_or(BETA);
    let function = keys.size("expert_gating_func")?.unwrap_or(SOFTMAX);
    config.mixture = Some(keys.later_mixture(&config, function, &[SOFTMAX], false)?);
    grow(&mut config, beta).map_err(|what| keys.unsupported(what))?;
    Ok(ArchSpec { config, options: deepseek::OPTIONS })
}

fn from_hf(keys: &mut hf_config::HfConfigKeys) -> Result<ArchSpec> {
    keys.default("first_k_dense_replace", 0);
    keys.only("scoring_func", "softmax")?;
    let beta = of_rotation(keys, "llama_4_scaling_beta")?.unwrap_or(BETA);
    // The length that the config itself gives, too.
    of_rotation(keys, "max_position_embeddings")?;
    let [groups, kept] = keys.expert_groups()?;
    let scoring = match groups {
        1 => RouterScoring::Softmax,
        _ => RouterScoring::GroupedSoftmax { groups, kept },
    };
    let mut spec = deepseek::from_hf(keys, |keys, config| keys.later_mixture(config, scoring))?;
    grow(&mut spec.config, beta).map_err(|what| keys.unsupported(what))?;
    Ok(spec)
}

/// Takes a number out of the settings of the rotation, in either layout.
fn of_rotation(keys: &mut hf_config::HfConfigKeys, key: &str) -> Result<Option<f32>> {
    let newer = keys.take_inside("rope_parameters", key)?;
    Ok(newer.or(keys.take_inside("rope_scaling", key)?))
}

/// Lets queries grow with each multiple of the length that the model was first trained for. Says
/// what is not supported.
fn grow(config: &mut ModelConfig, beta: f32) -> std::result::Result<(), &'static str> {
    let scoring = config.mixture.as_ref().map(|mixture| mixture.scoring);
    if let Some(RouterScoring::GroupedSoftmax { .. }) = scoring {
        // They would be scored otherwise than DeepSeek-V2's.
        return Err("experts in more than one group (n_group) are not supported");
    }
    let (Some(latent), RopeScaling::Yarn(yarn)) = (&mut config.latent, &config.rope.scaling) else {
        return Err("the rotation is not scaled by YaRN (rope_parameters), as this family's is");
    };
    latent.growth = Some(QueryGrowth { beta, length: yarn.original_max_positions });
    Ok(())
}

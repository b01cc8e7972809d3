//! Mistral Small 4: DeepSeek-V2's layer, whose experts are routed by a softmax and weighed among
//! themselves, and whose queries grow with their positions. Mistral AI 2026.

use super::gguf_config::{GgufConfigKeys, SOFTMAX};
use super::hf_keys::HfConfigKeys;
use super::{deepseek, latent, mistral};
use crate::config::RouterScoring;
use crate::spec::ArchSpec;
use crate::{ModelConfig, Result};

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = latent::from_gguf(keys)?;
    let beta = keys.float("attention.temperature_scale")?.unwrap_or(mistral::BETA);
    let function = keys.size("expert_gating_func")?.unwrap_or(SOFTMAX);
    config.mixture = Some(keys.later_mixture(&config, function, &[SOFTMAX], false)?);
    check_and_grow(&mut config, beta).map_err(|what| keys.unsupported(what))?;
    Ok(ArchSpec { config, options: deepseek::OPTIONS })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    keys.default("first_k_dense_replace", 0);
    keys.only("scoring_func", "softmax")?;
    let beta = mistral::hf_beta(keys)?;
    let [groups, kept] = keys.expert_groups()?;
    let scoring = match groups {
        1 => RouterScoring::Softmax,
        _ => RouterScoring::GroupedSoftmax { groups, kept },
    };
    let mut spec = deepseek::from_hf(keys, |keys, config| keys.later_mixture(config, scoring))?;
    check_and_grow(&mut spec.config, beta).map_err(|what| keys.unsupported(what))?;
    Ok(spec)
}

/// Refuses experts in groups, which would be scored otherwise than DeepSeek-V2's, and lets queries
/// grow.
fn check_and_grow(config: &mut ModelConfig, beta: f32) -> std::result::Result<(), &'static str> {
    let scoring = config.mixture.as_ref().map(|mixture| mixture.scoring);
    if let Some(RouterScoring::GroupedSoftmax { .. }) = scoring {
        return Err("experts in more than one group (n_group) are not supported");
    }
    mistral::grow(config, beta)
}

//! Qwen 3 with experts: Qwen 3's attention, and in most layers a mixture of experts in place of the
//! MLP. Yang et al. 2025.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::qwen3;
use crate::config::{MixtureConfig, Sliding};
use crate::spec::ArchSpec;
use crate::{ModelConfig, Result};

/// In GGUF files every layer has experts, and their weights are divided by their sum.
pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = keys.decoder()?;
    config.mixture = Some(keys.mixture(&config, true)?);
    Ok(ArchSpec { config, options: qwen3::OPTIONS })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let options = qwen3::hf_options(keys)?;
    let mut config = keys.decoder(false)?;
    // The reference reads no number of layers without a window in this family.
    keys.take::<usize>("max_window_layers")?;
    let window = keys.switched_window()?;
    config.sliding = window.map(|window| Sliding::everywhere(window, config.layers));
    config.mixture = Some(mixture(keys, &config)?);
    Ok(ArchSpec { config, options })
}

/// Reads the settings of the experts that Qwen's families share: every n-th layer has some, but for
/// those that are listed.
pub(super) fn mixture(keys: &mut HfConfigKeys, config: &ModelConfig) -> Result<MixtureConfig> {
    let width = keys.required("moe_intermediate_size")?;
    let step = keys.take("decoder_sparse_step")?.unwrap_or(1).max(1);
    let dense: Vec<usize> = keys.take("mlp_only_layers")?.unwrap_or_default();
    let has_experts = |layer: usize| !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
    Ok(MixtureConfig {
        normalise: keys.flag("norm_topk_prob")?,
        layers: (0..config.layers).map(has_experts).collect(),
        ..keys.mixture(width, config.layers)?
    })
}

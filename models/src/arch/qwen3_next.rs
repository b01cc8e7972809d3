//! Qwen3-Next: Qwen 3.5's layers, whose delta rule has its matrices fused in two tensors, and
//! experts with one that computes every token. Qwen Team 2025.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::{qwen2_moe, qwen3_5, qwen3_moe};
use crate::Result;
use crate::config::MixtureConfig;
use crate::spec::{ArchSpec, LayerOptions};
use cresset_kernels::recurrence::HeadMap;

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let ArchSpec { mut config, options } = qwen3_5::gguf_spec(keys, HeadMap::Grouped)?;
    config.mixture = Some(keys.mixture(&config, true)?);
    Ok(ArchSpec { config, options })
}

/// The config does not tell whether the files have a head that guesses tokens.
pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    keys.only("use_sliding_window", false)?;
    let ArchSpec { mut config, options } = qwen3_5::hf_spec(keys)?;
    let shared = Some(qwen2_moe::shared_expert(keys)?);
    config.mixture = Some(MixtureConfig { shared, ..qwen3_moe::mixture(keys, &config)? });
    Ok(ArchSpec { config, options: LayerOptions { further_layers: 1, ..options } })
}

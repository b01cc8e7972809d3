//! The text models of Qwen's models that also read images: the blocks of Qwen 2, Qwen 3 and Qwen 3
//! MoE. Their rotation has sections for the axes of images, along which the positions of text are
//! the same. Wang et al. 2024, "Qwen2-VL"; Bai et al. 2025, "Qwen2.5-VL" and "Qwen3-VL".

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::{qwen2, qwen3, qwen3_moe};
use crate::Result;
use crate::config::MixtureConfig;
use crate::spec::{ArchSpec, FusedExperts, LayerOptions};

pub(super) fn qwen2_from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    leave_out_images(keys)?;
    qwen2::from_gguf(keys)
}

pub(super) fn qwen3_from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    leave_out_images(keys)?;
    qwen3::from_gguf(keys)
}

pub(super) fn qwen3_moe_from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    leave_out_images(keys)?;
    qwen3_moe::from_gguf(keys)
}

/// Leaves out the sections of the rotation, and the number of layers that take features of images.
fn leave_out_images(keys: &mut GgufConfigKeys) -> Result<()> {
    keys.sections("rope.dimension_sections")?;
    keys.count("n_deepstack_layers")?;
    Ok(())
}

pub(super) fn qwen2_from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    keys.leave_out_sections()?;
    qwen2::from_hf(keys)
}

pub(super) fn qwen3_from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    keys.leave_out_sections()?;
    qwen3::from_hf(keys)
}

pub(super) fn qwen3_moe_from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    keys.leave_out_sections()?;
    let ArchSpec { mut config, options } = qwen3_moe::from_hf(keys)?;
    // The reference does so whatever the config says.
    config.mixture = config.mixture.map(|mixture| MixtureConfig { normalise: true, ..mixture });
    let fused_experts = FusedExperts::StackedOrTransposed;
    Ok(ArchSpec { config, options: LayerOptions { fused_experts, ..options } })
}

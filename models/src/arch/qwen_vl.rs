//! The text models of Qwen's models that also read images: the blocks of Qwen 2, Qwen 3 and Qwen 3
//! MoE. Their rotation has sections for the axes of images, along which the positions of text are
//! the same. Wang et al. 2024, "Qwen2-VL"; Bai et al. 2025, "Qwen2.5-VL" and "Qwen3-VL".

use super::{ArchSpec, Architecture, FusedExperts, LayerOptions};
use super::{gguf_config, hf_config, qwen2, qwen3, qwen3_moe};
use crate::Result;
use crate::config::MixtureConfig;

/// This `model_type` names configs in which one object has the settings of the text model and those
/// of the whole.
pub(super) const QWEN2_VL: Architecture =
    Architecture { gguf: Some(("qwen2vl", qwen2_from_gguf)), hf: ("qwen2_vl", qwen2_from_hf) };
pub(super) const QWEN2_VL_TEXT: Architecture =
    Architecture { gguf: None, hf: ("qwen2_vl_text", qwen2_from_hf) };

/// The same for the next generation. In GGUF files it has Qwen2-VL's name.
pub(super) const QWEN2_5_VL: Architecture =
    Architecture { gguf: None, hf: ("qwen2_5_vl", qwen2_from_hf) };
pub(super) const QWEN2_5_VL_TEXT: Architecture =
    Architecture { gguf: None, hf: ("qwen2_5_vl_text", qwen2_from_hf) };

pub(super) const QWEN3_VL: Architecture =
    Architecture { gguf: Some(("qwen3vl", qwen3_from_gguf)), hf: ("qwen3_vl_text", qwen3_from_hf) };

pub(super) const QWEN3_VL_MOE: Architecture = Architecture {
    gguf: Some(("qwen3vlmoe", qwen3_moe_from_gguf)),
    hf: ("qwen3_vl_moe_text", qwen3_moe_from_hf),
};

fn qwen2_from_gguf(keys: &mut gguf_config::GgufConfigKeys) -> Result<ArchSpec> {
    leave_out_images(keys)?;
    qwen2::from_gguf(keys)
}

fn qwen3_from_gguf(keys: &mut gguf_config::GgufConfigKeys) -> Result<ArchSpec> {
    leave_out_images(keys)?;
    qwen3::from_gguf(keys)
}

fn qwen3_moe_from_gguf(keys: &mut gguf_config::GgufConfigKeys) -> Result<ArchSpec> {
    leave_out_images(keys)?;
    qwen3_moe::from_gguf(keys)
}

/// Leaves out the sections of the rotation, and the number of layers that take features of images.
fn leave_out_images(keys: &mut gguf_config::GgufConfigKeys) -> Result<()> {
    keys.sections("rope.dimension_sections")?;
    keys.count("n_deepstack_layers")?;
    Ok(())
}

fn qwen2_from_hf(keys: &mut hf_config::HfConfigKeys) -> Result<ArchSpec> {
    keys.leave_out_sections()?;
    qwen2::from_hf(keys)
}

fn qwen3_from_hf(keys: &mut hf_config::HfConfigKeys) -> Result<ArchSpec> {
    keys.leave_out_sections()?;
    qwen3::from_hf(keys)
}

fn qwen3_moe_from_hf(keys: &mut hf_config::HfConfigKeys) -> Result<ArchSpec> {
    keys.leave_out_sections()?;
    let ArchSpec { mut config, options } = qwen3_moe::from_hf(keys)?;
    // The reference does so whatever the config says.
    config.mixture = config.mixture.map(|mixture| MixtureConfig { normalise: true, ..mixture });
    let fused_experts = FusedExperts::EitherWay;
    Ok(ArchSpec { config, options: LayerOptions { fused_experts, ..options } })
}

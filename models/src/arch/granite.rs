//! Granite 3: Llama's block with factors on embeddings, residual additions, attention and logits.
//! IBM Research 2024.
//!
//! The result of a sub-layer is multiplied by r and added to the residual stream x. Here the stream
//! is kept divided by r, so results are added as they are. A norm gives the same for x / r as for x
//! if its epsilon is divided by r².

use super::granite_hybrid::from_gguf;
use super::{ArchSpec, Architecture, LayerOptions, gguf_config, hf_config, llama};
use crate::loader::tensors::NameMap;
use crate::{ModelConfig, Result};

pub(super) const GRANITE: Architecture =
    Architecture { gguf: Some(("granite", from_gguf)), hf: ("granite", from_hf) };

/// The same with experts in every layer.
pub(super) const GRANITE_MOE: Architecture =
    Architecture { gguf: Some(("granitemoe", from_gguf)), hf: ("granitemoe", moe_from_hf) };

const MOE_NAMES: NameMap = NameMap {
    hf: &[
        ("mlp.gate.", "block_sparse_moe.router.layer."),
        ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear"),
        ("mlp.experts.down_proj", "block_sparse_moe.output_linear"),
    ],
    ..NameMap::USUAL
};

/// The factors, 1 where a config has none.
pub(super) struct Multipliers {
    embedding: f32,
    residual: f32,
    attention: f32,
    /// Logits are divided by this.
    logits: f32,
}

impl Multipliers {
    pub(super) fn apply(self, config: &mut ModelConfig) {
        config.embedding_scale = self.embedding / self.residual;
        config.rms_norm_eps /= self.residual * self.residual;
        config.attention_scale = self.attention;
        config.logits_scale = 1.0 / self.logits;
    }
}

pub(super) fn gguf_multipliers(keys: &mut gguf_config::GgufConfigKeys) -> Result<Multipliers> {
    let mut factor = |key: &str| -> Result<f32> { Ok(keys.float(key)?.unwrap_or(1.0)) };
    Ok(Multipliers {
        embedding: factor("embedding_scale")?,
        residual: factor("residual_scale")?,
        attention: factor("attention.scale")?,
        logits: factor("logit_scale")?,
    })
}

fn from_hf(keys: &mut hf_config::HfConfigKeys) -> Result<ArchSpec> {
    let ArchSpec { mut config, options } = llama::from_hf(keys)?;
    hf_multipliers(keys)?.apply(&mut config);
    Ok(ArchSpec { config, options })
}

pub(super) fn hf_multipliers(keys: &mut hf_config::HfConfigKeys) -> Result<Multipliers> {
    let mut factor = |key: &str| -> Result<f32> { Ok(keys.take(key)?.unwrap_or(1.0)) };
    Ok(Multipliers {
        embedding: factor("embedding_multiplier")?,
        residual: factor("residual_multiplier")?,
        attention: factor("attention_multiplier")?,
        logits: factor("logits_scaling")?,
    })
}

fn moe_from_hf(keys: &mut hf_config::HfConfigKeys) -> Result<ArchSpec> {
    let ArchSpec { mut config, options } = from_hf(keys)?;
    config.mixture = Some(keys.mixture(config.intermediate_size, config.layers)?);
    Ok(ArchSpec { config, options: LayerOptions { names: MOE_NAMES, ..options } })
}

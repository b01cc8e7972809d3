//! Granite 3: Llama's block with factors on embeddings, residual additions, attention and logits.
//! IBM Research 2024.
//!
//! The result of a sub-layer is multiplied by r and added to the residual stream x. Here the stream
//! is kept divided by r, so results are added as they are. A norm gives the same for x / r as for x
//! if its epsilon is divided by r².

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::llama;
use crate::spec::{ArchSpec, LayerOptions, NameMap};
use crate::{ModelConfig, Result};

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

pub(super) fn gguf_multipliers(keys: &mut GgufConfigKeys) -> Result<Multipliers> {
    let mut factor = |key: &str| -> Result<f32> { Ok(keys.float(key)?.unwrap_or(1.0)) };
    Ok(Multipliers {
        embedding: factor("embedding_scale")?,
        residual: factor("residual_scale")?,
        attention: factor("attention.scale")?,
        logits: factor("logit_scale")?,
    })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let ArchSpec { mut config, options } = llama::from_hf(keys)?;
    hf_multipliers(keys)?.apply(&mut config);
    Ok(ArchSpec { config, options })
}

pub(super) fn hf_multipliers(keys: &mut HfConfigKeys) -> Result<Multipliers> {
    let mut factor = |key: &str| -> Result<f32> { Ok(keys.take(key)?.unwrap_or(1.0)) };
    Ok(Multipliers {
        embedding: factor("embedding_multiplier")?,
        residual: factor("residual_multiplier")?,
        attention: factor("attention_multiplier")?,
        logits: factor("logits_scaling")?,
    })
}

pub(super) fn moe_from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let ArchSpec { mut config, options } = from_hf(keys)?;
    config.mixture = Some(keys.mixture(config.intermediate_size, config.layers)?);
    Ok(ArchSpec { config, options: LayerOptions { names: MOE_NAMES, ..options } })
}

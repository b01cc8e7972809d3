//! Reads decoders with latent attention, in both formats.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use crate::config::{LatentConfig, RopeScaling};
use crate::{ModelConfig, Result};

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ModelConfig> {
    let latent = LatentConfig {
        query_rank: keys.nullable("q_lora_rank")?,
        rank: keys.required("kv_lora_rank")?,
        plain: keys.required("qk_nope_head_dim")?,
        rotated: keys.required("qk_rope_head_dim")?,
        value: keys.required("v_head_dim")?,
    };
    // What follows from these sizes, and is said again in more than one way.
    let whole = latent.plain.saturating_add(latent.rotated);
    for key in ["qk_head_dim", "head_dim"] {
        let stated = keys.take::<usize>(key)?.unwrap_or(whole);
        if ![latent.rotated, whole].contains(&stated) {
            return Err(keys.bad(&format!("`{key}` is {stated}, where heads have {whole}")));
        }
    }
    let part = keys.rotated_part(1.0)?;
    if part < 1.0 && (whole as f32 * part).round() != latent.rotated as f32 {
        return Err(keys.bad("`partial_rotary_factor` and `qk_rope_head_dim` differ"));
    }
    keys.default("head_dim", latent.rotated);
    Ok(with_latent(keys.decoder(false)?, latent))
}

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ModelConfig> {
    let rotated = keys.needed("rope.dimension_count")?;
    // These are the sizes of what is cached, and only in the oldest files those of heads.
    let cached = [keys.needed("attention.key_length")?, keys.needed("attention.value_length")?];
    let own = [keys.size("attention.key_length_mla")?, keys.size("attention.value_length_mla")?];
    let [whole, value] = [own[0].unwrap_or(cached[0]), own[1].unwrap_or(cached[1])];
    let plain = whole.checked_sub(rotated).ok_or_else(|| {
        keys.bad("more of each head is rotated than it has (attention.key_length_mla)")
    })?;
    let latent = LatentConfig {
        query_rank: keys.size("attention.q_lora_rank")?,
        rank: keys.needed("attention.kv_lora_rank")?,
        plain,
        rotated,
        value,
    };
    keys.size("attention.head_count_kv")?;
    let width = keys.mlp_width()?;
    let mut config = keys.decoder_of(1, rotated, width)?;
    let multiplier = keys.float("rope.scaling.yarn_log_multiplier")?;
    sharpen(&mut config.rope.scaling, multiplier);
    Ok(with_latent(config, latent))
}

/// The converter multiplies this by 0.1. It has no key for `mscale`, which it takes to be equal.
pub(super) fn sharpen(scaling: &mut RopeScaling, multiplier: Option<f32>) {
    if let (RopeScaling::Yarn(yarn), Some(multiplier)) = (scaling, multiplier) {
        (yarn.mscale_all_dim, yarn.attention_factor) = (multiplier / 0.1, 1.0);
    }
}

fn with_latent(mut config: ModelConfig, latent: LatentConfig) -> ModelConfig {
    let sharpening = match &config.rope.scaling {
        RopeScaling::Yarn(yarn) => yarn.sharpening(),
        _ => 1.0,
    };
    let whole = latent.plain.saturating_add(latent.rotated);
    config.attention_scale = sharpening / (whole as f32).sqrt();
    (config.kv_heads, config.head_dim) = (1, latent.rank.saturating_add(latent.rotated));
    config.latent = Some(latent);
    config
}

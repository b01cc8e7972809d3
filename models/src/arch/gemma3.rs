//! Gemma 3: Gemma 2 with norms on Q and K in place of the attention's soft cap, and one full layer
//! after five with a sliding window and a RoPE base of their own. Kamath et al. 2025.

use super::gemma2::{self, OPTIONS};
use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::hf_rope;
use crate::Result;
use crate::config::{RopeConfig, RopeScaling, Sliding};
use crate::spec::{ArchSpec, LayerOptions, QkNorms};

const PATTERN: usize = 6;
const WINDOW: usize = 4096;
const LAYERS_OF_27B: usize = 62;
const THETA: f32 = 1_000_000.0;
const SLIDING_THETA: f32 = 10_000.0;

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = gemma2::gguf_decoder(keys, LAYERS_OF_27B)?;
    let theta = keys.float("rope.freq_base_swa")?.unwrap_or(SLIDING_THETA);
    let layers = keys.sliding_layers(config.layers, PATTERN)?;
    let rope =
        Some(RopeConfig { theta, rotary_dim: config.rope.rotary_dim, scaling: RopeScaling::None });
    config.sliding = keys.size("attention.sliding_window")?.map(|window| Sliding {
        window,
        layers,
        rope,
        heads: None,
    });
    Ok(ArchSpec { config, options: LayerOptions { qk_norm: QkNorms::EachHead, ..OPTIONS } })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let theta = keys.take("rope_theta")?.unwrap_or(THETA);
    let sliding_theta = keys.take("rope_local_base_freq")?.unwrap_or(SLIDING_THETA);
    let ropes = hf_rope::by_kind(keys, [theta, sliding_theta])?;
    let (mut config, options) = gemma2::hf_decoder(keys)?;
    let sliding_rope = hf_rope::apply_by_kind(ropes, &mut config)?;
    let window = keys.window(WINDOW)?;
    let (newer, older) =
        (keys.take("_sliding_window_pattern")?, keys.take("sliding_window_pattern")?);
    let pattern = newer.or(older).unwrap_or(PATTERN).max(1);
    let sliding = keys.sliding(&config, window, |layer| (layer + 1) % pattern != 0)?;
    config.sliding = sliding.map(|sliding| Sliding { rope: Some(sliding_rope), ..sliding });
    Ok(ArchSpec { config, options: LayerOptions { qk_norm: QkNorms::EachHead, ..options } })
}

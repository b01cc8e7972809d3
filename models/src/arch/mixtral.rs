//! Mixtral: Mistral's attention and a mixture of experts in every layer. Jiang et al. 2024.

use super::hf_keys::HfConfigKeys;
use crate::Result;
use crate::config::Sliding;
use crate::spec::{ArchSpec, LayerOptions, NameMap};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

/// The rotation's base if the config has none.
const THETA: f32 = 1_000_000.0;

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    keys.default("rope_theta", THETA);
    let mut config = keys.decoder(false)?;
    let window = keys.take("sliding_window")?;
    config.sliding = window.map(|window| Sliding::everywhere(window, config.layers));
    config.mixture = Some(keys.mixture(config.intermediate_size, config.layers)?);
    let options = LayerOptions {
        activation: keys.activation("hidden_act", Activation::Silu)?,
        names: NameMap {
            hf: &[
                ("mlp.", "block_sparse_moe."),
                ("gate_proj", "w1"),
                ("up_proj", "w3"),
                ("down_proj", "w2"),
            ],
            ..NameMap::USUAL
        },
        ..LayerOptions::plain(RopeStyle::Neox)
    };
    Ok(ArchSpec { config, options })
}

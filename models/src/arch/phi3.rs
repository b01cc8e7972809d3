//! Phi-3 and 4: Llama's block with Q, K and V in one matrix and gate and up in another, LongRoPE,
//! and in the smaller ones heads of which a part is rotated. Abdin et al. 2024.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use crate::Result;
use crate::config::Sliding;
use crate::spec::{ArchSpec, LayerOptions, NameMap};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

const OPTIONS: LayerOptions = LayerOptions {
    names: NameMap {
        gguf: &[("self_attn.qkv_proj", "attn_qkv"), ("mlp.gate_up_proj", "ffn_up")],
        ..NameMap::USUAL
    },
    ..LayerOptions::plain(RopeStyle::Neox)
};

/// A window of 0 tokens means no window.
pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = keys.decoder()?;
    let window = keys.count("attention.sliding_window")?.filter(|window| *window > 0);
    config.sliding = window.map(|window| Sliding::everywhere(window, config.layers));
    if let Some(scaling) = keys.long_rope(&config)? {
        config.rope.scaling = scaling;
    }
    Ok(ArchSpec { config, options: OPTIONS })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    // Some configs have these two, which the reference does not read.
    keys.take::<usize>("full_attn_mod")?;
    keys.take::<f32>("interpolate_factor")?;
    let part = keys.rotated_part(1.0)?;
    let mut config = keys.decoder_with(false, part)?;
    let window = keys.take("sliding_window")?;
    config.sliding = window.map(|window| Sliding::everywhere(window, config.layers));
    let activation = keys.activation("hidden_act", Activation::Silu)?;
    Ok(ArchSpec { config, options: LayerOptions { activation, ..OPTIONS } })
}

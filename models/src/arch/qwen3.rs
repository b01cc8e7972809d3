//! Qwen 3: norms on the heads of Q and K, and a head size that does not follow from the hidden
//! size. Yang et al. 2025.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::qwen2;
use crate::Result;
use crate::spec::{ArchSpec, LayerOptions, Presence, QkNorms};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;

pub(super) const OPTIONS: LayerOptions =
    LayerOptions { qk_norm: QkNorms::EachHead, ..LayerOptions::plain(RopeStyle::Neox) };

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let (qkv_bias, output_bias) = (Presence::Optional, Presence::Optional);
    Ok(ArchSpec {
        config: keys.decoder()?,
        options: LayerOptions { qkv_bias, output_bias, ..OPTIONS },
    })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let options = hf_options(keys)?;
    Ok(ArchSpec { config: qwen2::decoder(keys)?, options })
}

/// The biases and the activation that a config states.
pub(super) fn hf_options(keys: &mut HfConfigKeys) -> Result<LayerOptions> {
    let bias = Presence::when(keys.flag("attention_bias")?);
    Ok(LayerOptions {
        activation: keys.activation("hidden_act", Activation::Silu)?,
        qkv_bias: bias,
        output_bias: bias,
        ..OPTIONS
    })
}

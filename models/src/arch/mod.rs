//! One file per architecture.

mod gemma2;
mod gemma3;
mod gguf_config;
mod hf_config;
mod hf_rope;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;
#[cfg(test)]
mod tests;

use crate::loader::damaged;
use crate::loader::gguf::GgufFile;
use crate::loader::tensors::{Presence, Spelling};
use crate::{Error, ModelConfig, Result};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;
use std::path::Path;

/// How files of one architecture become a decoder.
pub struct Architecture {
    /// Its name in GGUF files, where it has one, and how they are read.
    gguf: Option<(&'static str, fn(&mut gguf_config::Keys) -> Result<Blueprint>)>,
    /// Its `model_type` in Hugging Face's configs.
    hf: (&'static str, fn(&mut hf_config::Keys) -> Result<Blueprint>),
}

pub static REGISTRY: [Architecture; 6] =
    [llama::LLAMA, mistral::MISTRAL, qwen2::QWEN2, qwen3::QWEN3, gemma2::GEMMA2, gemma3::GEMMA3];

/// A decoder's shape, and which of the skeleton's options it uses.
pub struct Blueprint {
    pub config: ModelConfig,
    pub recipe: Recipe,
}

/// Options of the shared decoder skeleton.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    pub rope_style: RopeStyle,
    pub activation: Activation,
    /// Biases of Q, K and V.
    pub qkv_bias: Presence,
    /// Bias of the attention's output projection.
    pub output_bias: Presence,
    pub mlp_bias: Presence,
    /// Norms on the heads of Q and K.
    pub qk_norm: bool,
    /// Whether what attention and MLP add to the residual stream is normed as well.
    pub sub_layer_norms: bool,
    pub spelling: Spelling,
}

impl Recipe {
    /// SwiGLU, no biases, no QK-norm.
    const fn plain(rope_style: RopeStyle) -> Self {
        Self {
            rope_style,
            activation: Activation::Silu,
            qkv_bias: Presence::Never,
            output_bias: Presence::Never,
            mlp_bias: Presence::Never,
            qk_norm: false,
            sub_layer_norms: false,
            spelling: Spelling { gguf: &[], norms_less_one: false },
        }
    }
}

impl Blueprint {
    /// Refuses sizes that contradict each other.
    fn checked(self, path: &Path) -> Result<Self> {
        self.config.check().map_err(|what| damaged(path, &what))?;
        Ok(self)
    }
}

pub fn from_gguf(file: &GgufFile) -> Result<Blueprint> {
    let mut keys = gguf_config::Keys::new(file)?;
    let known = || REGISTRY.iter().filter_map(|a| a.gguf);
    let found = known().find(|(name, _)| *name == keys.architecture());
    let (_, build) =
        found.ok_or_else(|| unknown(file.path(), keys.architecture(), known().map(|a| a.0)))?;
    let blueprint = build(&mut keys)?;
    keys.finish()?;
    blueprint.checked(file.path())
}

pub fn from_hf(path: &Path, json: &[u8]) -> Result<Blueprint> {
    let mut keys = hf_config::Keys::parse(path, json)?;
    let kind: String = keys.required("model_type")?;
    let known = || REGISTRY.iter().map(|a| a.hf);
    let found = known().find(|(name, _)| *name == kind);
    let (_, build) = found.ok_or_else(|| unknown(path, &kind, known().map(|a| a.0)))?;
    let blueprint = build(&mut keys)?;
    keys.finish()?;
    blueprint.checked(path)
}

fn unknown<'a>(path: &Path, name: &str, known: impl Iterator<Item = &'a str>) -> Error {
    let known: Vec<_> = known.collect();
    let (path, known) = (path.display(), known.join(", "));
    Error::Unsupported(format!(
        "{path}: architecture {name:?} is not supported; this build has {known}"
    ))
}

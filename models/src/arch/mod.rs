//! One file per architecture.

mod gguf_config;
mod hf_config;
mod llama;
mod mistral;

use crate::loader::gguf::GgufFile;
use crate::loader::tensors::Presence;
use crate::{Error, ModelConfig, Result};
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;
use gguf_config::Keys;
use hf_config::HfConfig;
use std::path::Path;

/// How files of one architecture become a decoder.
pub struct Architecture {
    pub name: &'static str,
    /// Where GGUF files of this architecture exist.
    gguf: Option<fn(&mut Keys) -> Result<Blueprint>>,
    /// A refusal says which setting this build does not have.
    hf: fn(&HfConfig) -> Result<Blueprint, String>,
}

pub static REGISTRY: [Architecture; 2] = [llama::LLAMA, mistral::MISTRAL];

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
    pub qk_norm: Presence,
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
            qk_norm: Presence::Never,
        }
    }
}

pub fn from_gguf(file: &GgufFile) -> Result<Blueprint> {
    let mut keys = Keys::new(file)?;
    let build =
        find(keys.architecture()).and_then(|a| a.gguf).ok_or_else(|| unknown(file.path(), keys.architecture()))?;
    let blueprint = build(&mut keys)?;
    keys.finish()?;
    Ok(blueprint)
}

pub fn from_hf(path: &Path, json: &[u8]) -> Result<Blueprint> {
    let config = HfConfig::parse(path, json)?;
    let architecture = find(&config.model_type).ok_or_else(|| unknown(path, &config.model_type))?;
    (architecture.hf)(&config).map_err(|what| Error::Unsupported(format!("{}: {what}", path.display())))
}

fn find(name: &str) -> Option<&'static Architecture> {
    REGISTRY.iter().find(|a| a.name == name)
}

fn unknown(path: &Path, name: &str) -> Error {
    let known: Vec<_> = REGISTRY.iter().map(|a| a.name).collect();
    Error::Unsupported(format!(
        "{}: architecture {name:?} is not supported; this build has {}",
        path.display(),
        known.join(", ")
    ))
}

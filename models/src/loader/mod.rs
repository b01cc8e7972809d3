//! From files to a model: containers (`gguf`, `safetensors`), names, and the registry of
//! architectures.

#[cfg(test)]
mod fuzz;
pub mod gguf;
pub(crate) mod names;
pub mod safetensors;
pub(crate) mod store;
pub(crate) mod tensors;
#[cfg(test)]
mod tests;

use crate::arch::{self, Blueprint};
use crate::decoder::{Decoder, Weights};
use crate::{Error, Model, Result};
use candle_core::Device;
use cresset_kernels::Compute;
use gguf::GgufFile;
use memmap2::Mmap;
use safetensors::Checkpoint;
use std::path::{Path, PathBuf};
use store::{Host, Store};
use tensors::{Container, Tensors};

/// The files of a release.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// One GGUF file: weights, config, tokenizer and template inside.
    Gguf(PathBuf),
    /// A folder in Hugging Face layout: config.json, *.safetensors (sharded or not),
    /// tokenizer.json.
    HfFolder(PathBuf),
}

#[derive(Clone)]
pub struct LoadOptions {
    pub device: Device,
    pub compute: Compute,
    /// Dequantise every weight to f32 at load: the exact reference mode.
    pub dequantise: bool,
    /// Largest number of tokens in one step (workspace size).
    pub max_batched_tokens: usize,
    /// Positions the RoPE tables cover.
    pub max_context: usize,
}

/// Loads a model. Ends with an error that names every tensor left over or missing and every config
/// key not understood. The files are unmapped again: afterwards the weights are in memory once.
pub fn load(source: &ModelSource, options: &LoadOptions) -> Result<Box<dyn Model>> {
    let (blueprint, weights) = read(source, &mut Host { dequantise: options.dequantise })?;
    Ok(Box::new(Decoder::new(blueprint, weights, options)?))
}

/// A model's shape, and its weights in a store.
pub(crate) fn read<S: Store>(
    source: &ModelSource,
    store: &mut S,
) -> Result<(Blueprint, Weights<S>)> {
    match source {
        ModelSource::Gguf(path) => {
            let file = GgufFile::open(path)?;
            fill(arch::from_gguf(&file)?, Container::Gguf(&file), path, store)
        }
        ModelSource::HfFolder(folder) => {
            let path = folder.join("config.json");
            let blueprint = arch::from_hf(&path, &safetensors::read_json(&path)?)?;
            let files = Checkpoint::open(folder)?;
            fill(blueprint, Container::Checkpoint(&files), folder, store)
        }
    }
}

fn fill<S: Store>(
    mut blueprint: Blueprint,
    files: Container,
    path: &Path,
    store: &mut S,
) -> Result<(Blueprint, Weights<S>)> {
    let mut tensors = Tensors::new(files, path.to_owned(), store, blueprint.recipe.spelling);
    let weights = Weights::load(&mut blueprint, &mut tensors);
    let weights = tensors.finish(weights)?;
    Ok((blueprint, weights))
}

pub(crate) fn damaged(path: &Path, what: &str) -> Error {
    Error::BadFile(format!("{} is damaged or incomplete: {what}; fetch it again", path.display()))
}

fn map_file(path: &Path) -> Result<Mmap> {
    let io = |source| Error::Io { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(io)?;
    if file.metadata().map_err(io)?.len() == 0 {
        return Err(damaged(path, "it is empty"));
    }
    // SAFETY: model files are not written to while they are mapped; the mapping ends with the load.
    unsafe { Mmap::map(&file) }.map_err(io)
}

//! From files to a model: containers (`gguf`, `safetensors`), names, and the registry of architectures.

#[cfg(test)]
mod fuzz;
pub mod gguf;
pub(crate) mod names;
pub mod safetensors;
pub(crate) mod tensors;
#[cfg(test)]
mod tests;

use crate::arch::{self, Blueprint};
use crate::layers::decoder::Decoder;
use crate::{Error, Model, Result};
use candle_core::Device;
use cresset_kernels::Compute;
use gguf::GgufFile;
use memmap2::Mmap;
use safetensors::Checkpoint;
use std::path::{Path, PathBuf};
use tensors::{Container, Tensors};

/// The files of a release.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// One GGUF file: weights, config, tokenizer and template inside.
    Gguf(PathBuf),
    /// A folder in Hugging Face layout: config.json, *.safetensors (sharded or not), tokenizer.json.
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

/// Loads a model. Ends with an error that names every tensor left over or missing and every config key not understood.
/// The files are unmapped again: afterwards the weights are in memory once.
pub fn load(source: &ModelSource, options: &LoadOptions) -> Result<Box<dyn Model>> {
    match source {
        ModelSource::Gguf(path) => load_gguf(path, options),
        ModelSource::HfFolder(folder) => load_folder(folder, options),
    }
}

fn load_gguf(path: &Path, options: &LoadOptions) -> Result<Box<dyn Model>> {
    let file = GgufFile::open(path)?;
    let blueprint = arch::from_gguf(&file)?;
    build(blueprint, Container::Gguf(&file), path, options)
}

fn load_folder(folder: &Path, options: &LoadOptions) -> Result<Box<dyn Model>> {
    let path = folder.join("config.json");
    let blueprint = arch::from_hf(&path, &safetensors::read_json(&path)?)?;
    let files = Checkpoint::open(folder)?;
    build(blueprint, Container::Checkpoint(&files), folder, options)
}

fn build(blueprint: Blueprint, files: Container, path: &Path, options: &LoadOptions) -> Result<Box<dyn Model>> {
    let mut tensors = Tensors::new(files, path.to_owned(), options.dequantise, blueprint.recipe.spelling);
    let weights = Decoder::weights(&blueprint, &mut tensors);
    let weights = tensors.finish(weights)?;
    Ok(Box::new(Decoder::new(blueprint, weights, options)?))
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

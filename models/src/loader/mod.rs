//! Reads files into a model: containers (`gguf`, `safetensors`), names, and the registry of
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

use crate::arch::{self, ArchSpec};
use crate::{Error, Result};
use cresset_kernels::OpMemory;
use gguf::GgufFile;
use memmap2::Mmap;
use safetensors::Checkpoint;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use store::WeightStore;
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

/// Builds a value from a model's shape and its weights, which go into `store`. Fails with an error
/// that names every tensor left over or missing and every config key not understood. The files are
/// unmapped again: afterwards the weights are in memory once.
pub(crate) fn read<M: OpMemory, T>(
    source: &ModelSource,
    store: &mut dyn WeightStore<M>,
    build: impl FnOnce(ArchSpec, &mut Tensors<M>) -> Option<T>,
) -> Result<T> {
    let fill = |spec: ArchSpec, files: Container, path: &Path| {
        let mut tensors = Tensors {
            container: files,
            path: path.to_owned(),
            store,
            names: spec.options.names,
            taken: BTreeSet::new(),
            problems: Vec::new(),
            failed: None,
        };
        let built = build(spec, &mut tensors);
        tensors.finish(built)
    };
    match source {
        ModelSource::Gguf(path) => {
            let file = GgufFile::open(path)?;
            fill(arch::from_gguf(&file)?, Container::Gguf(&file), path)
        }
        ModelSource::HfFolder(folder) => {
            let path = folder.join("config.json");
            let spec = arch::from_hf(&path, &safetensors::read_json(&path)?)?;
            let files = Checkpoint::open(folder)?;
            fill(spec, Container::Checkpoint(&files), folder)
        }
    }
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

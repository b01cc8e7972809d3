//! Reads files into a model: containers (`gguf`, `safetensors`), names, and the registry of
//! architectures.

mod digest;
mod experts;
mod file;
#[cfg(test)]
mod fuzz;
pub mod gguf;
mod heads;
mod mxfp4;
pub(crate) mod names;
pub(crate) mod quantised;
pub mod safetensors;
mod share;
mod source;
pub(crate) mod store;
pub(crate) mod tensors;
#[cfg(test)]
mod tests;

use crate::arch::{self, ArchSpec};
use crate::{Error, Result};
use cresset_kernels::OpMemory;
use gguf::GgufFile;
use safetensors::Checkpoint;
use share::RankShare;
use std::collections::BTreeSet;
use std::path::Path;
use store::WeightStore;
use tensors::{Container, Reading, Tensors};

pub use source::{FileLayout, ModelSource};

/// Builds a value from a model's shape and its weights, which go into `store`. Fails with an error
/// that names every tensor left over or missing, every config key not understood, and every file
/// whose digest is not that of the release.
pub(crate) fn read<M: OpMemory, T>(
    source: &ModelSource,
    store: &mut dyn WeightStore<M>,
    reading: Reading,
    build: impl FnOnce(ArchSpec, &mut Tensors<M>) -> Option<T>,
) -> Result<T> {
    let whole = reading == Reading::Whole;
    let fill = |spec: ArchSpec, container: Container, path: &Path| {
        let mut tensors = Tensors {
            container,
            path: path.to_owned(),
            store,
            names: spec.options.names,
            share: RankShare::default(),
            taken: BTreeSet::new(),
            problems: Vec::new(),
            failed: None,
            reading,
        };
        let built = build(spec, &mut tensors);
        tensors.finish(built)
    };
    match source.layout() {
        FileLayout::Gguf(path) => {
            let (header, files) = GgufFile::read_all(path, &|name| source.open(name))?;
            let (spec, blake3) = (arch::from_gguf(&header)?, header.header_blake3.clone());
            let tensors = header.tensors_in(files);
            let built = fill(spec, Container::Gguf(Box::new(tensors), header), path)?;
            source.check_header(path, &blake3)?;
            Ok(built)
        }
        FileLayout::HfFolder(folder) => {
            let config = source.read_needed("config.json")?;
            let path = folder.join("config.json");
            let spec = arch::from_hf(&path, &config)?;
            let quantisation = arch::quantisation(&path, &config)?;
            let files = Checkpoint::open(source, folder, quantisation.as_ref())?;
            let shards = files.shards.clone();
            let built = fill(spec, Container::Checkpoint(files), folder)?;
            if whole {
                source.check_rest(&shards)?;
            }
            Ok(built)
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

pub(crate) fn damaged(path: &Path, what: &str) -> Error {
    Error::BadFile(format!("{} is damaged or incomplete: {what}; fetch it again", path.display()))
}

//! Reads files into a model: containers (`gguf`, `safetensors`), names and tensors.

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
mod shard_entry;
mod share;
mod source;
pub(crate) mod store;
pub(crate) mod tensors;
#[cfg(test)]
mod tests;

use crate::Result;
use crate::spec::ArchSpec;
use cresset_kernels::OpMemory;
use gguf::GgufFile;
use quantised::Quantisation;
use safetensors::Checkpoint;
use share::RankShare;
use std::collections::BTreeSet;
use std::path::Path;
use store::WeightStore;
use tensors::{Container, Reading, Tensors};

pub use source::{FileLayout, ModelSource};

/// How a model's shape is read from a release, which the loader knows nothing of.
#[derive(Clone, Copy)]
pub(crate) struct SpecReader {
    pub gguf: fn(&GgufFile) -> Result<ArchSpec>,
    /// From the path and the text of a folder's `config.json`.
    pub config: fn(&Path, &[u8]) -> Result<(ArchSpec, Option<Quantisation>)>,
}

/// Builds a value from a model's shape and its weights, which go into `store`. Fails with an error
/// that names every tensor left over or missing, every config key not understood, and every file
/// whose digest is not that of the release.
pub(crate) fn read<M: OpMemory, T>(
    source: &ModelSource,
    store: &mut dyn WeightStore<M>,
    reading: Reading,
    specs: SpecReader,
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
            let (spec, blake3) = ((specs.gguf)(&header)?, header.header_blake3.clone());
            let tensors = header.tensors_in(files);
            let built = fill(spec, Container::Gguf(Box::new(tensors), header), path)?;
            source.check_header(path, &blake3)?;
            Ok(built)
        }
        FileLayout::HfFolder(folder) => {
            let config = source.read_needed("config.json")?;
            let (spec, quantisation) = (specs.config)(&folder.join("config.json"), &config)?;
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

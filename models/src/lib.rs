//! Turns model files and token ids into tokens: loading (GGUF, safetensors), one file per
//! architecture, the decoder (`decoder` and `blocks`, written once), and its two implementations:
//! `cpu` and `cuda`. `witness` is candle-transformers' model of the same file, to compare with.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

pub mod arch;
pub mod batch;
pub mod blocks;
pub mod cache_kinds;
pub mod config;
pub mod cpu;
pub mod cuda;
pub mod decoder;
pub mod goldens;
pub mod kv_cache;
pub mod loader;
pub mod options;
pub mod planted;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
pub mod witness;

pub use batch::ForwardBatch;
pub use config::ModelConfig;
pub use cpu::{ModelCard, inspect};
pub use kv_cache::KvCache;
pub use loader::{FileLayout, ModelSource};
pub use options::ModelOptions;

use cache_kinds::CacheKinds;
use cresset_kernels::sampling::{RowSampling, SampleResult};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model file is damaged, truncated or not what its name says. The text names the file and
    /// what to do.
    #[error("{0}")]
    BadFile(String),
    /// A file of a release is gone or another one than the one that was qualified. The text names
    /// it and what to do.
    #[error("{0}")]
    Changed(String),
    /// The file is sound but asks for something this build does not have.
    #[error("{0}")]
    Unsupported(String),
    #[error("{path}: {source}")]
    Io { path: std::path::PathBuf, source: std::io::Error },
    /// A batch that contradicts itself, the model or the cache: a bug of the caller, found before
    /// anything is computed.
    #[error("batch: {0}")]
    Batch(String),
    /// A device has too little memory. The text says what takes it and what to do.
    #[error("{0}")]
    OutOfMemory(String),
    #[error(transparent)]
    Kernel(#[from] cresset_kernels::Error),
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A sequence whose next tokens are to be guessed.
#[derive(Clone, Debug)]
pub struct WantedGuesses {
    /// The parameters by which its next token will be sampled. Guesses are sampled by them too.
    pub row: RowSampling,
    /// Its blocks in the first group of layers. It gets no guess that needs another block.
    pub blocks: Vec<u32>,
    pub most: usize,
}

/// A loaded decoder with its KV cache and sampler.
pub trait Model: Send {
    fn config(&self) -> &ModelConfig;

    /// Bytes of weights held in memory.
    fn weight_bytes(&self) -> usize;

    /// Bytes of memory that the model takes, its KV cache included: those of the device's memory on
    /// a device.
    fn memory_bytes(&self) -> usize;

    /// Blocks of the KV cache that batches may name.
    fn num_blocks(&self) -> usize;

    /// How layers share these blocks.
    fn cache_kinds(&self) -> &CacheKinds;

    /// Most steps that may be launched and not yet collected.
    fn depth(&self) -> usize;

    /// Starts one step over a ragged batch. `rows[i]` says how to sample from the logits of
    /// `batch.logits_indices[i]`, the last token of its sequence. Where the batch's `feedback`
    /// names a result, it is one of the step launched just before. The K and V of every token of
    /// the batch are in the cache once the step is collected.
    ///
    /// On the CPU, and on a GPU with `deterministic`, a row's result has the same bits whatever
    /// else is in the batch and however its prompt was chunked.
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<()>;

    /// Whether the model has a head that guesses tokens.
    fn guesses(&self) -> bool {
        false
    }

    /// Guesses the next tokens of sequences, at most as many as each wants: with the model's head,
    /// from the states of the step collected last. Sequences that had no row there get none.
    fn guess(&mut self, wanted: Vec<WantedGuesses>) -> Result<Vec<Vec<u32>>> {
        Ok(vec![Vec::new(); wanted.len()])
    }

    /// Waits for the oldest launched step and returns its results, one for each of its rows.
    fn collect(&mut self) -> Result<Vec<SampleResult>>;

    /// Drops everything launched. Fails on a device that has failed, because it stays unusable.
    fn recover(&mut self) -> Result<()>;
}

/// Loads a model to where the options say. Fails with an error that names every tensor left over or
/// missing and every config key not understood.
pub fn load(source: &ModelSource, options: &ModelOptions) -> Result<Box<dyn Model>> {
    match &options.gpu {
        Some(gpu) if options.further_ranks.is_empty() => {
            Ok(Box::new(cuda::CudaModel::load(source, gpu, options)?))
        }
        Some(_) => Ok(Box::new(cuda::TensorParallel::load(source, options)?)),
        None => Ok(Box::new(cpu::CpuModel::load(source, options)?)),
    }
}

impl Error {
    /// The error of a call that has nothing to collect.
    pub(crate) fn nothing_launched() -> Self {
        Self::Batch("nothing was launched".into())
    }
}

impl ForwardBatch {
    /// Refuses rows whose number is not that of the batch's logits.
    pub(crate) fn check_rows(&self, rows: usize) -> Result<()> {
        let wanted = self.logits_indices.len();
        if rows == wanted {
            return Ok(());
        }
        Err(Error::Batch(format!("{rows} rows are sampled where {wanted} are wanted")))
    }
}

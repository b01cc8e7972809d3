//! Model files in, logits out: loading (GGUF, safetensors), the shared decoder skeleton, one file
//! per architecture.

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
pub mod config;
pub mod cuda;
pub mod decoder;
pub mod kv_cache;

pub mod loader;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

pub use batch::ForwardBatch;
pub use config::ModelConfig;
pub use kv_cache::{KvCache, KvLayout};
pub use loader::{LoadOptions, ModelSource, load};

use candle_core::Tensor;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model file is damaged, truncated or not what its name says. The text names the file and
    /// what to do.
    #[error("{0}")]
    BadFile(String),
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

/// A loaded decoder. It owns weights and workspace; the KV cache is the caller's.
pub trait Model: Send {
    fn config(&self) -> &ModelConfig;
    /// One step over a ragged batch. Returns f32 logits `[batch.logits_indices.len(), vocab_size]`,
    /// valid until the next call. The K and V of every token of the batch are in `kv` afterwards. A
    /// row's logits have the same bits whatever else is in the batch and however its prompt was
    /// chunked.
    fn forward(&mut self, batch: &ForwardBatch, kv: &mut KvCache) -> Result<Tensor>;
    /// Bytes of weights held in memory.
    fn weight_bytes(&self) -> usize;
}

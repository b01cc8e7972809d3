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
mod assemble;
pub mod batch;
pub mod blocks;
pub mod cache_kinds;
pub mod config;
pub mod cpu;
pub mod cuda;
pub mod decoder;
mod error;
pub mod goldens;
pub mod kv_cache;
pub mod loader;
mod model;
pub mod options;
pub mod planted;
pub mod spec;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
pub mod witness;

pub use batch::ForwardBatch;
pub use config::ModelConfig;
pub use cpu::{ModelCard, inspect};
pub use error::{Error, Result};
pub use kv_cache::KvCache;
pub use loader::{FileLayout, ModelSource};
pub use model::{Model, WantedGuesses};
pub use options::ModelOptions;

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

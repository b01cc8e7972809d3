//! Builds the model and its KV cache, runs them, and samples.

use super::runner::{RowResult, Runner};
use super::sampler::{RowSampling, Sampler};
use candle_core::{CpuStorage, Device, Storage, Tensor};
use cresset_kernels::Compute;
use cresset_models::{ForwardBatch, KvCache, LoadOptions, Model, ModelConfig, ModelSource};

/// How a model is loaded and how much memory its cache may take.
#[derive(Clone, Debug)]
pub struct RunnerOptions {
    /// Worker threads, the engine's own included.
    pub threads: usize,
    /// Dequantise every weight to f32 at load: the exact reference mode.
    pub dequantise: bool,
    /// Bytes for the KV cache.
    pub kv_bytes: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Largest number of tokens in one step.
    pub max_batched_tokens: usize,
    /// Longest sequence, tokens; `None` is what the model allows.
    pub max_context: Option<usize>,
}

/// What loading found out.
#[derive(Clone, Debug)]
pub struct LoadedInfo {
    pub config: ModelConfig,
    pub weight_bytes: usize,
    /// Blocks of the KV cache, for `EngineOptions`.
    pub num_blocks: usize,
}

#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    #[error(transparent)]
    Model(#[from] cresset_models::Error),
    #[error(
        "the KV cache may take {kv_bytes} bytes, but one block of {block_size} tokens takes {block_bytes}; allow more"
    )]
    NoRoomForCache { kv_bytes: usize, block_size: usize, block_bytes: usize },
}

/// The real runner: owns weights and KV cache.
pub struct ModelRunner {
    model: Box<dyn Model>,
    kv: KvCache,
    sampler: Sampler,
}

impl ModelRunner {
    /// Loads the model and allocates as many KV blocks as `kv_bytes` holds.
    pub fn load(source: &ModelSource, options: &RunnerOptions) -> Result<(Self, LoadedInfo), RunnerError> {
        let model = cresset_models::load(source, &load_options(options))?;
        let num_blocks = num_blocks(model.config(), options)?;
        let layout = model.config().kv_layout();
        let kv = KvCache::new(&layout, num_blocks, options.block_size, &Device::Cpu)?;
        let info = LoadedInfo { config: model.config().clone(), weight_bytes: model.weight_bytes(), num_blocks };
        Ok((Self::new(model, kv), info))
    }

    /// A runner around a model that is already loaded.
    pub fn new(model: Box<dyn Model>, kv: KvCache) -> Self {
        Self { model, kv, sampler: Sampler::default() }
    }
}

fn load_options(options: &RunnerOptions) -> LoadOptions {
    LoadOptions {
        device: Device::Cpu,
        compute: Compute::new(options.threads),
        dequantise: options.dequantise,
        max_batched_tokens: options.max_batched_tokens,
        max_context: options.max_context.unwrap_or(usize::MAX),
    }
}

fn num_blocks(config: &ModelConfig, options: &RunnerOptions) -> Result<usize, RunnerError> {
    let block_bytes = config.kv_layout().block_bytes(options.block_size);
    match options.kv_bytes / block_bytes {
        0 => {
            Err(RunnerError::NoRoomForCache { kv_bytes: options.kv_bytes, block_size: options.block_size, block_bytes })
        }
        blocks => Ok(blocks),
    }
}

impl Runner for ModelRunner {
    fn run(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<Vec<RowResult>, String> {
        let logits =
            self.model.forward(batch, &mut self.kv).map_err(|error| format!("the forward pass failed: {error}"))?;
        let sampler = &mut self.sampler;
        with_rows(&logits, rows.len(), |logits| {
            let sample = |(logits, row)| sampler.sample(logits, row).map_err(|e| e.to_string());
            logits.zip(rows).map(sample).collect()
        })
        .map_err(|error| format!("the logits cannot be read: {error}"))
    }
}

/// Calls `read` with the rows of a contiguous f32 `[rows, vocab_size]` tensor, without a copy.
fn with_rows<T>(
    logits: &Tensor,
    rows: usize,
    read: impl FnOnce(std::slice::ChunksExact<'_, f32>) -> T,
) -> candle_core::Result<T> {
    let (found, vocab_size) = logits.dims2()?;
    if found != rows {
        candle_core::bail!("{found} rows of logits where {rows} were asked for");
    }
    let (storage, layout) = logits.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(values)), Some((from, to))) => {
            Ok(read(values[from..to].chunks_exact(vocab_size)))
        }
        _ => candle_core::bail!("they are not contiguous f32 values in host memory"),
    }
}

#[cfg(test)]
mod tests;

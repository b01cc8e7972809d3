//! Builds the model and its KV cache, runs them, and samples.

use super::error::EngineError;
use super::gpu_runner::{self, GpuRunner};
use super::runner::{RowResult, Runner, nothing_launched, step_error};
use super::sampler::Sampler;
use super::sampling_params::RowSampling;
use candle_core::{CpuStorage, Device, Storage, Tensor};
use cresset_kernels::Compute;
use cresset_models::{ForwardBatch, KvCache, LoadOptions, Model, ModelConfig, ModelSource};
use std::sync::{Mutex, OnceLock, PoisonError};

/// How a model is loaded and how much memory its cache may take.
#[derive(Clone)]
pub struct RunnerOptions {
    /// Where it runs, if not on the CPU.
    pub gpu: Option<gpu_runner::Options>,
    /// Worker threads, the engine's own included.
    pub threads: usize,
    /// Dequantise every weight to f32 at load: the exact reference mode.
    pub dequantise: bool,
    /// Bytes for the KV cache in the machine's own memory.
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

/// Loads the model to where the options say.
pub fn load(
    source: &ModelSource,
    options: &RunnerOptions,
) -> Result<(Box<dyn Runner>, LoadedInfo), EngineError> {
    match &options.gpu {
        Some(gpu) => GpuRunner::load(source, options, gpu)
            .map(|(runner, info)| (Box::new(runner) as _, info)),
        None => {
            ModelRunner::load(source, options).map(|(runner, info)| (Box::new(runner) as _, info))
        }
    }
}

/// The runner on the CPU: owns weights and KV cache.
pub struct ModelRunner {
    model: Box<dyn Model>,
    kv: KvCache,
    compute: Compute,
    samplers: Samplers,
    /// Of the launched step: it is computed right away.
    results: Option<Vec<RowResult>>,
}

impl ModelRunner {
    /// Loads the model and allocates as many KV blocks as `kv_bytes` holds.
    pub fn load(
        source: &ModelSource,
        options: &RunnerOptions,
    ) -> Result<(Self, LoadedInfo), EngineError> {
        let compute = Compute::new(options.threads);
        let model = cresset_models::load(source, &load_options(options, compute.clone()))?;
        let num_blocks = num_blocks(model.config(), options)?;
        let layout = model.config().kv_layout();
        let kv = KvCache::new(&layout, num_blocks, options.block_size, &Device::Cpu)?;
        let info = LoadedInfo {
            config: model.config().clone(),
            weight_bytes: model.weight_bytes(),
            num_blocks,
        };
        Ok((Self::new(model, kv, compute), info))
    }

    /// A runner around a model that is already loaded.
    pub fn new(model: Box<dyn Model>, kv: KvCache, compute: Compute) -> Self {
        Self { model, kv, compute, samplers: Mutex::default(), results: None }
    }
}

fn load_options(options: &RunnerOptions, compute: Compute) -> LoadOptions {
    LoadOptions {
        device: Device::Cpu,
        compute,
        dequantise: options.dequantise,
        max_batched_tokens: options.max_batched_tokens,
        max_context: options.max_context.unwrap_or(usize::MAX),
    }
}

fn num_blocks(config: &ModelConfig, options: &RunnerOptions) -> Result<usize, EngineError> {
    let block_bytes = config.kv_layout().block_bytes(options.block_size);
    match options.kv_bytes / block_bytes {
        0 => Err(EngineError::OutOfMemory(format!(
            "the KV cache may take {} bytes, but one block of {} tokens takes {block_bytes}; \
             allow more",
            options.kv_bytes, options.block_size
        ))),
        blocks => Ok(blocks),
    }
}

impl Runner for ModelRunner {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        if self.results.is_some() || !batch.feedback.is_empty() {
            let text = "a step was launched before the one before it was collected";
            return Err(EngineError::Shape(text.into()));
        }
        let logits = self
            .model
            .forward(batch, &mut self.kv)
            .map_err(|error| step_error("the forward pass failed", &error))?;
        let results = with_logits(&logits, rows.len(), |logits| {
            sample(&self.compute, &self.samplers, logits, rows)
        });
        let unreadable = |error| EngineError::Shape(format!("the logits cannot be read: {error}"));
        self.results = Some(results.map_err(unreadable)?);
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        self.results.take().ok_or_else(nothing_launched)
    }

    fn recover(&mut self) -> Result<(), EngineError> {
        self.results = None;
        Ok(())
    }
}

/// Workspaces of the rows being sampled: as many as there are threads.
type Samplers = Mutex<Vec<Sampler>>;

/// Each row by itself, on whichever thread is free.
fn sample(
    compute: &Compute,
    samplers: &Samplers,
    (logits, vocab_size): (&[f32], usize),
    rows: &[RowSampling],
) -> Vec<RowResult> {
    let results: Vec<OnceLock<RowResult>> = rows.iter().map(|_| OnceLock::new()).collect();
    let workspaces = || samplers.lock().unwrap_or_else(PoisonError::into_inner);
    compute.run(rows.len(), |i| {
        let mut sampler = workspaces().pop().unwrap_or_default();
        let sampled = sampler.sample(&logits[i * vocab_size..][..vocab_size], &rows[i]);
        workspaces().push(sampler);
        results[i].get_or_init(|| sampled.map_err(EngineError::from));
    });
    let not_run = || Err(EngineError::Sampling("the row was not sampled".into()));
    results.into_iter().map(|result| result.into_inner().unwrap_or_else(not_run)).collect()
}

/// Calls `read` with the values and the `vocab_size` of a contiguous f32 `[rows, vocab_size]`
/// tensor, without a copy.
fn with_logits<T>(
    logits: &Tensor,
    rows: usize,
    read: impl FnOnce((&[f32], usize)) -> T,
) -> candle_core::Result<T> {
    let (found, vocab_size) = logits.dims2()?;
    if found != rows {
        candle_core::bail!("{found} rows of logits where {rows} were asked for");
    }
    let (storage, layout) = logits.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(values)), Some((from, to))) => {
            Ok(read((&values[from..to], vocab_size)))
        }
        _ => candle_core::bail!("they are not contiguous f32 values in host memory"),
    }
}

#[cfg(test)]
mod tests;

//! From a release's files to a started engine and its text side.

use super::device;
use crate::catalogue::QualifiedModel;
use crate::config::Config;
use crate::engine::model_runner::{self, RunnerOptions};
use crate::engine::{EngineError, EngineHandle, EngineOptions, gpu_runner};
use crate::pool::{self, ServedModel};
use crate::text::{self, TextModel};
use cresset_kernels::gpu::Gpu;
use cresset_models::ModelSource;
use std::sync::Arc;

/// A model that can generate; what it may be used for is the caller's to know.
pub struct Loaded {
    pub text: Arc<TextModel>,
    pub engine: EngineHandle,
}

/// Blocking: reads and repacks every weight.
pub fn load(source: &ModelSource, config: &Config) -> Result<Loaded, EngineError> {
    Ok(Loaded { text: text(source)?, engine: engine(source, config)?.engine })
}

/// A proven release as the node serves it: its text side at once (blocking), its engine on demand.
pub fn served(qualified: QualifiedModel, config: &Config) -> Result<ServedModel, EngineError> {
    let (source, text) = (qualified.source().clone(), text(qualified.source())?);
    let max_context = max_context(config).unwrap_or(usize::MAX);
    let config = config.clone();
    Ok(ServedModel {
        qualified,
        text,
        max_context,
        load: Box::new(move || engine(&source, &config)),
    })
}

/// Bytes that a release is expected to take once it is loaded: weights about as large as its files,
/// and on the CPU its KV cache. A GPU's caches have a share of their own.
pub fn expected_bytes(qualified: &QualifiedModel, config: &Config) -> u64 {
    let on_gpu = matches!(device::chosen(config), Ok(Some(_)));
    qualified.manifest().bytes() + kv_bytes(config, on_gpu) as u64
}

fn text(source: &ModelSource) -> Result<Arc<TextModel>, EngineError> {
    let unusable = |error: text::Error| EngineError::NotLoaded(error.to_string());
    TextModel::load(source).map(Arc::new).map_err(unusable)
}

fn engine(source: &ModelSource, config: &Config) -> Result<pool::LoadedEngine, EngineError> {
    let gpu =
        device::open(config).map_err(|failure| EngineError::NotLoaded(failure.to_string()))?;
    let options = runner_options(config, gpu);
    let (runner, info) = model_runner::load(source, &options)?;
    let bytes = (info.weight_bytes + options.kv_bytes) as u64;
    let engine = &config.engine;
    let options = EngineOptions {
        max_batched_tokens: engine.max_batched_tokens,
        max_rows: engine.max_rows,
        max_waiting: engine.max_waiting,
        block_size: engine.block_size,
        num_blocks: info.num_blocks,
        max_context: max_context(config).unwrap_or(usize::MAX).min(info.config.max_positions),
    };
    Ok(pool::LoadedEngine { engine: EngineHandle::start(runner, options), bytes })
}

fn runner_options(config: &Config, gpu: Option<Arc<dyn Gpu>>) -> RunnerOptions {
    let engine = &config.engine;
    let on_gpu = |gpu| gpu_runner::Options {
        gpu,
        memory_share: engine.gpu_memory_share,
        deterministic: engine.deterministic,
        max_rows: engine.max_rows,
        graph_rows: engine.gpu_graph_rows,
    };
    RunnerOptions {
        kv_bytes: kv_bytes(config, gpu.is_some()),
        gpu: gpu.map(on_gpu),
        threads: config.threads(),
        dequantise: engine.dequantise,
        block_size: engine.block_size,
        max_batched_tokens: engine.max_batched_tokens,
        max_context: max_context(config),
    }
}

/// Of the machine's own memory.
fn kv_bytes(config: &Config, on_gpu: bool) -> usize {
    if on_gpu { 0 } else { config.engine.kv_mib << 20 }
}

/// In the configuration 0 stands for the model's own limit.
fn max_context(config: &Config) -> Option<usize> {
    Some(config.engine.max_context).filter(|limit| *limit > 0)
}

//! From a release's files to a started engine and its text side.

use crate::config::Config;
use crate::engine::model_runner::{ModelRunner, RunnerOptions};
use crate::engine::{EngineHandle, EngineOptions};
use crate::text::TextModel;
use cresset_models::ModelSource;
use std::sync::Arc;

/// A model that can generate; what it may be used for is the caller's to know.
pub struct Loaded {
    pub text: Arc<TextModel>,
    pub engine: EngineHandle,
}

/// Blocking: reads and repacks every weight.
pub fn load(source: &ModelSource, config: &Config) -> Result<Loaded, String> {
    let text = TextModel::load(source).map_err(|error| error.to_string())?;
    let (runner, info) = ModelRunner::load(source, &runner_options(config)).map_err(|error| error.to_string())?;
    let engine = &config.engine;
    let options = EngineOptions {
        max_batched_tokens: engine.max_batched_tokens,
        max_rows: engine.max_rows,
        max_waiting: engine.max_waiting,
        block_size: engine.block_size,
        num_blocks: info.num_blocks,
        max_context: max_context(config).unwrap_or(usize::MAX).min(info.config.max_positions),
    };
    Ok(Loaded { text: Arc::new(text), engine: EngineHandle::start(Box::new(runner), options) })
}

fn runner_options(config: &Config) -> RunnerOptions {
    let engine = &config.engine;
    RunnerOptions {
        threads: config.threads(),
        dequantise: engine.dequantise,
        kv_bytes: engine.kv_mib << 20,
        block_size: engine.block_size,
        max_batched_tokens: engine.max_batched_tokens,
        max_context: max_context(config),
    }
}

/// In the configuration 0 stands for the model's own limit.
fn max_context(config: &Config) -> Option<usize> {
    Some(config.engine.max_context).filter(|limit| *limit > 0)
}

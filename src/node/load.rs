//! Loads a release: turns its files into a started engine and its text side.

use super::Assembly;
use crate::catalogue::{Manifest, QualifiedModel};
use crate::engine::model_runner::ModelRunner;
use crate::engine::{EngineError, EngineHandle, EngineOptions};
use crate::failpoint::failpoint;
use crate::pool::{LoadedEngine, ServedModel};
use crate::text::{self, TemplateLimits, TextModel};
use cresset_kernels::gpu::Gpu;
use cresset_models::{ModelCard, ModelOptions, ModelSource};
use std::sync::Arc;

/// A loaded model that may not be qualified: for qualifying it and for tests, never for serving it.
pub struct UnqualifiedModel {
    pub text: Arc<TextModel>,
    pub engine: EngineHandle,
}

impl Assembly {
    /// Loads a release that may not be qualified. Blocking: it reads and repacks every weight.
    pub fn load(&self, source: &ModelSource) -> Result<UnqualifiedModel, EngineError> {
        let text = text(source, self.template_limits())?;
        let source = source.clone().with_header(text.header_blake3.clone());
        Ok(UnqualifiedModel { engine: self.load_engine(&source)?.engine, text })
    }

    /// A qualified release for the pool: its text side is loaded now (blocking), its engine on
    /// demand.
    pub(super) fn served_model(
        &self,
        qualified: QualifiedModel,
    ) -> Result<ServedModel, EngineError> {
        let text = text(qualified.source(), self.template_limits())?;
        let (manifest, header) = (qualified.manifest().clone(), text.header_blake3.clone());
        let max_context = self.max_context().unwrap_or(usize::MAX);
        let assembly = self.clone();
        let load = Arc::new(move || assembly.load_proven(&manifest, header.clone()));
        Ok(ServedModel { qualified, text, max_context, load })
    }

    /// Loads a release if it is qualified at this moment. Its tokenizer was read from the GGUF
    /// header with that digest.
    fn load_proven(
        &self,
        manifest: &Manifest,
        header: Option<String>,
    ) -> Result<LoadedEngine, EngineError> {
        let proven = self.qualified(manifest, &self.host()).map_err(|why| {
            let kind = if why.is_about_bytes() {
                EngineError::FilesChanged
            } else {
                EngineError::Unproven
            };
            kind(why.to_string())
        })?;
        let source = proven.source().clone().with_header(header);
        self.load_engine(&source).map_err(|error| match error {
            // Files that cannot be loaded are often other files, which is the better explanation.
            EngineError::NotLoaded(_) => match source.check(u64::MAX) {
                Err(cresset_models::Error::Changed(why)) => EngineError::FilesChanged(why),
                _ => error,
            },
            _ => error,
        })
    }

    /// Bytes that a release is expected to take once it is loaded: its weights take about as much
    /// as its files. Its KV cache is counted on the CPU only, since a GPU's caches have a share of
    /// the GPU's own memory.
    pub(super) fn expected_bytes(&self, qualified: &QualifiedModel) -> u64 {
        qualified.manifest().bytes() + self.kv_bytes() as u64
    }

    fn template_limits(&self) -> TemplateLimits {
        let template = &self.config.template;
        let written_bytes = template.max_written_mib << 20;
        TemplateLimits { steps: template.max_steps, written_bytes }
    }

    fn load_engine(&self, source: &ModelSource) -> Result<LoadedEngine, EngineError> {
        failpoint!("node::loading");
        let options = self.model_options(self.device.open()?);
        let (runner, info) = ModelRunner::load(source, &options)?;
        let bytes = (info.weight_bytes + options.kv_bytes) as u64;
        let engine = &self.config.engine;
        let options = EngineOptions {
            max_batched_tokens: engine.max_batched_tokens,
            max_rows: engine.max_rows,
            max_waiting: engine.max_waiting,
            block_size: engine.block_size,
            num_blocks: info.num_blocks,
            max_context: self.max_context().unwrap_or(usize::MAX).min(info.config.max_positions),
        };
        let engine = EngineHandle::start(Box::new(runner), options);
        Ok(LoadedEngine { engine, bytes })
    }

    fn model_options(&self, gpu: Option<Arc<dyn Gpu>>) -> ModelOptions {
        let engine = &self.config.engine;
        ModelOptions {
            gpu,
            threads: self.config.threads(),
            dequantise: engine.dequantise,
            deterministic: engine.deterministic,
            kv_bytes: self.kv_bytes(),
            gpu_memory_share: engine.gpu_memory_share,
            gpu_graph_rows: engine.gpu_graph_rows,
            block_size: engine.block_size,
            max_batched_tokens: engine.max_batched_tokens,
            max_rows: engine.max_rows,
            max_context: self.max_context(),
        }
    }

    /// Bytes of the machine's own memory for one model's KV cache.
    fn kv_bytes(&self) -> usize {
        if self.device.properties().is_some() { 0 } else { self.config.engine.kv_mib << 20 }
    }

    /// `None` stands for the model's own limit, which the configuration writes as 0.
    fn max_context(&self) -> Option<usize> {
        Some(self.config.engine.max_context).filter(|limit| *limit > 0)
    }
}

/// Refuses what this build cannot serve. It reads headers, tokenizer and template, no weights.
pub fn inspect(source: &ModelSource) -> Result<(), String> {
    cresset_models::inspect(source).map_err(|error| error.to_string())?;
    TextModel::load(source).map_err(|error| error.to_string())?;
    Ok(())
}

/// What the headers of a release tell of it.
pub fn card(source: &ModelSource) -> Result<ModelCard, String> {
    cresset_models::inspect(source).map_err(|error| error.to_string())
}

fn text(source: &ModelSource, limits: TemplateLimits) -> Result<Arc<TextModel>, EngineError> {
    let unusable = |error: text::Error| EngineError::NotLoaded(error.to_string());
    TextModel::load_within(source, limits).map(Arc::new).map_err(unusable)
}

//! The runner around a model on the CPU, with one step in flight, or on a device, with two.

use super::error::EngineError;
use super::runner::{RowResult, Runner, step_error};
use cresset_kernels::sampling::RowSampling;
use cresset_models::cache_kinds::CacheKinds;
use cresset_models::{ForwardBatch, Model, ModelConfig, ModelOptions, ModelSource, WantedGuesses};

/// The result of loading a model.
#[derive(Clone, Debug)]
pub struct LoadedInfo {
    pub config: ModelConfig,
    pub weight_bytes: usize,
    /// Memory of weights, KV cache and, on a device, whatever else the model takes of its memory.
    pub memory_bytes: usize,
    /// Blocks of the KV cache, for `EngineOptions`.
    pub num_blocks: usize,
    /// How layers share these blocks.
    pub cache: CacheKinds,
}

pub struct ModelRunner {
    model: Box<dyn Model>,
}

impl ModelRunner {
    /// Loads the model to where the options say.
    pub fn load(
        source: &ModelSource,
        options: &ModelOptions,
    ) -> Result<(Self, LoadedInfo), EngineError> {
        let model = cresset_models::load(source, options)?;
        let info = LoadedInfo {
            config: model.config().clone(),
            weight_bytes: model.weight_bytes(),
            memory_bytes: model.memory_bytes(),
            num_blocks: model.num_blocks(),
            cache: model.cache_kinds().clone(),
        };
        Ok((Self { model }, info))
    }
}

impl Runner for ModelRunner {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        let failed = |error| step_error("the step cannot be run", &error);
        self.model.launch(batch, rows).map_err(failed)
    }

    fn sample(&mut self, rows: &[Option<RowSampling>]) -> Result<(), EngineError> {
        let failed = |error| step_error("the step cannot be sampled", &error);
        self.model.sample(rows).map_err(failed)
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        let failed = |error| step_error("the step failed", &error);
        let results = self.model.collect().map_err(failed)?;
        Ok(results.into_iter().map(|result| result.map_err(EngineError::from)).collect())
    }

    fn guesses(&self) -> bool {
        self.model.guesses()
    }

    fn guess(&mut self, wanted: Vec<WantedGuesses>) -> Result<Vec<Vec<u32>>, EngineError> {
        let failed = |error| step_error("nothing can be guessed", &error);
        self.model.guess(wanted).map_err(failed)
    }

    fn depth(&self) -> usize {
        self.model.depth()
    }

    fn recover(&mut self) -> Result<(), EngineError> {
        // A device that cannot finish its work is lost, whatever error the driver reports.
        self.model.recover().map_err(|error| {
            EngineError::DeviceLost(format!("the GPU cannot go on: {error}; restart the node"))
        })
    }
}

#[cfg(test)]
mod tests;

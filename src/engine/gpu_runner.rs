//! The runner on a GPU: the model samples where it computes, and one step runs while the host
//! schedules the next.

use super::error::EngineError;
use super::gpu_sampling::{device_row, row_result};
use super::model_runner::{LoadedInfo, RunnerOptions};
use super::runner::{RowResult, Runner, step_error};
use super::sampling_params::RowSampling;
use cresset_kernels::Compute;
use cresset_kernels::gpu::{Gpu, Kind};
use cresset_kernels::sampling::gpu::GREEDY;
use cresset_models::cuda::{self as gpu, GpuModel};
use cresset_models::{ForwardBatch, ModelSource};
use std::collections::VecDeque;
use std::sync::Arc;

/// What a GPU needs to know beside what every runner does.
#[derive(Clone)]
pub struct Options {
    pub gpu: Arc<dyn Gpu>,
    /// Of the device's memory, 0 to 1: what the model may take.
    pub memory_share: f64,
    /// The same tokens in any company.
    pub deterministic: bool,
    /// Largest number of sequences in one step.
    pub max_rows: usize,
    /// Largest number of rows whose steps are recorded.
    pub graph_rows: usize,
}

pub struct GpuRunner {
    model: GpuModel,
    /// Per launched step and row: why the host rejected the row's sampling parameters, if it did.
    /// It overrides the device's result.
    refused: VecDeque<Vec<Option<EngineError>>>,
}

impl GpuRunner {
    /// Loads the model, sizes its cache by what is left of its share of the device's memory, and
    /// records its steps.
    pub fn load(
        source: &ModelSource,
        options: &RunnerOptions,
        on: &Options,
    ) -> Result<(Self, LoadedInfo), EngineError> {
        let model = GpuModel::load(
            source,
            gpu::Options {
                gpu: on.gpu.clone(),
                compute: Compute::new(options.threads),
                kind: if options.dequantise { Kind::F32 } else { Kind::Bf16 },
                deterministic: on.deterministic,
                memory_share: on.memory_share,
                block_size: options.block_size,
                max_batched_tokens: options.max_batched_tokens,
                max_rows: on.max_rows,
                max_context: options.max_context.unwrap_or(usize::MAX),
                graph_rows: on.graph_rows,
            },
        )?;
        let info = LoadedInfo {
            config: model.config().clone(),
            weight_bytes: model.weight_bytes(),
            num_blocks: model.num_blocks(),
        };
        Ok((Self { model, refused: VecDeque::new() }, info))
    }
}

impl Runner for GpuRunner {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        let vocab_size = self.model.config().vocab_size;
        let (mut encoded, mut refused) =
            (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        for row in rows {
            let (row, reason) = match device_row(row, vocab_size) {
                Ok(row) => (row, None),
                Err(error) => ((GREEDY, Vec::new()), Some(error.into())),
            };
            encoded.push(row);
            refused.push(reason);
        }
        self.model
            .launch(batch, &encoded)
            .map_err(|error| step_error("the step cannot be run", &error))?;
        self.refused.push_back(refused);
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        let failed = |error| step_error("the step failed", &error);
        let outcomes = self.model.collect().map_err(failed)?;
        let refused = self.refused.pop_front().unwrap_or_default();
        let result = |(outcome, reason): (_, Option<EngineError>)| {
            reason.map_or_else(|| row_result(outcome), Err)
        };
        Ok(outcomes.into_iter().zip(refused).map(result).collect())
    }

    fn depth(&self) -> usize {
        gpu::DEPTH
    }

    fn recover(&mut self) -> Result<(), EngineError> {
        self.refused.clear();
        // Whatever the driver calls it, a device that cannot finish its work is lost.
        self.model.recover().map_err(|error| {
            EngineError::DeviceLost(format!("the GPU cannot go on: {error}; restart the node"))
        })
    }
}

#[cfg(test)]
mod tests;

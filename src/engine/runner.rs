//! The seam between scheduling and tensors. Tests use a scripted runner in place of a real one.

use super::error::EngineError;
use cresset_kernels::Error as KernelError;
use cresset_kernels::sampling::params::{RowSampling, SampleError, Sampled};
use cresset_models::{Error as ModelError, ForwardBatch, WantedGuesses};

/// The outcome of one row: its next token, or why there is none. A row's error fails its own
/// sequence only.
pub type RowResult = Result<Sampled, EngineError>;

/// Computes steps in the order of their launches. A returned error, or a panic, fails every
/// sequence of the step and of those launched after it.
pub trait Runner: Send {
    /// Starts one step; its results are `collect`ed in the order of the launches. `rows[i]` says
    /// how to sample from the logits of `batch.logits_indices[i]`.
    /// - Where `batch.feedback` names a result of the step launched just before, that result is the
    ///   token, not the one in `input_ids`.
    /// - If the named result is that of a failed row, any token may be used: the sequence has
    ///   ended.
    /// - `rows[i].tokens` must not be kept beyond the call, or appending to it becomes a copy.
    /// - If the grammar of a row waits for a token (`RowSampling::awaits_mask`), the step is not
    ///   sampled before `sample`.
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError>;

    /// Lets the step launched last be sampled, if a grammar waited for a token of the step before:
    /// called once that was collected, and before the next launch. The rows are given again, with
    /// all tokens before; `None` stands for one whose sequence has ended since, and any result may
    /// be given for it. `rows[i].tokens` must not be kept.
    fn sample(&mut self, rows: &[Option<RowSampling>]) -> Result<(), EngineError> {
        Err(EngineError::Shape(format!("no step waits for the grammars of {} rows", rows.len())))
    }

    /// Waits for the results of the oldest launched step: one for each of its rows.
    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError>;

    /// Whether it has a head of its own that guesses tokens.
    fn guesses(&self) -> bool {
        false
    }

    /// Guesses the next tokens of sequences that had a row in the step collected last, at most as
    /// many as each wants. The others get none.
    fn guess(&mut self, wanted: Vec<WantedGuesses>) -> Result<Vec<Vec<u32>>, EngineError> {
        Ok(vec![Vec::new(); wanted.len()])
    }

    /// Most steps that may be launched and not yet collected: 1, or 2 for a device that computes
    /// while the host schedules.
    fn depth(&self) -> usize {
        1
    }

    /// Drops everything launched, after a step has failed. An error means that no further step can
    /// be run, and ends the engine.
    fn recover(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
}

/// Converts an error of loading; its text stays as it is.
impl From<ModelError> for EngineError {
    fn from(error: ModelError) -> Self {
        kind_of(&error)(error.to_string())
    }
}

impl From<SampleError> for EngineError {
    fn from(error: SampleError) -> Self {
        match error {
            SampleError::Grammar(why) => Self::Grammar(why),
            error => Self::Sampling(error.to_string()),
        }
    }
}

/// Converts an error of a step; `what` says what failed and begins the text.
pub(crate) fn step_error(what: &str, error: &ModelError) -> EngineError {
    kind_of(error)(format!("{what}: {error}"))
}

/// Tells which kind of engine error an error of the models or of the kernels is.
fn kind_of(error: &ModelError) -> fn(String) -> EngineError {
    match error {
        ModelError::Batch(_) | ModelError::Kernel(KernelError::Shape { .. }) => EngineError::Shape,
        ModelError::OutOfMemory(_) | ModelError::Kernel(KernelError::OutOfMemory { .. }) => {
            EngineError::OutOfMemory
        }
        ModelError::Kernel(KernelError::DeviceLost { .. }) => EngineError::DeviceLost,
        ModelError::Changed(_) => EngineError::FilesChanged,
        ModelError::BadFile(_)
        | ModelError::Unsupported(_)
        | ModelError::Io { .. }
        | ModelError::Kernel(KernelError::Unsupported { .. } | KernelError::NoDevice(_)) => {
            EngineError::NotLoaded
        }
        ModelError::Candle(_)
        | ModelError::Kernel(
            KernelError::Device { .. } | KernelError::GroupLost { .. } | KernelError::Candle(_),
        ) => EngineError::Compute,
    }
}

/// The error of a `collect` without a `launch` before it.
pub fn nothing_launched() -> EngineError {
    EngineError::Shape("nothing was launched".into())
}

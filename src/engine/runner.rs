//! The seam between scheduling and tensors: the real `ModelRunner`, or a scripted one that costs
//! nothing.

use super::error::EngineError;
use super::sampler::{SampleError, Sampled, TokenLogprobs};
use super::sampling_params::RowSampling;
use cresset_kernels::Error as KernelError;
use cresset_models::{Error as ModelError, ForwardBatch};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What became of one row: its next token, or why there is none. A row's error fails its own
/// sequence only.
pub type RowResult = Result<Sampled, EngineError>;

/// Computes steps in the order of their launches. A returned error, or a panic, fails every
/// sequence of the step and of those launched after it.
pub trait Runner: Send {
    /// Starts one step; its results are `collect`ed in the order of the launches. `rows[i]` says
    /// how to sample from the logits of `batch.logits_indices[i]`; a clone of its tokens that
    /// outlives the call makes appending to them a copy. Where `batch.feedback` names a result of
    /// the step launched just before, that result is the row's token, not its `input_ids`; after a
    /// row that failed any token will do.
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError>;

    /// The results of the oldest launched step: one for each of its rows. Waits for them.
    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError>;

    /// Most steps that may be launched and not yet collected: 1, or 2 for a device that computes
    /// while the host schedules.
    fn depth(&self) -> usize {
        1
    }

    /// After a failed step: forgets everything launched. An error means that no further step can be
    /// run, and ends the engine.
    fn recover(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
}

/// An error of loading, in the words of the models crate.
impl From<ModelError> for EngineError {
    fn from(error: ModelError) -> Self {
        kind_of(&error)(error.to_string())
    }
}

impl From<SampleError> for EngineError {
    fn from(error: SampleError) -> Self {
        Self::Sampling(error.to_string())
    }
}

/// An error of a step; `what` says what failed.
pub fn step_error(what: &str, error: &ModelError) -> EngineError {
    kind_of(error)(format!("{what}: {error}"))
}

fn kind_of(error: &ModelError) -> fn(String) -> EngineError {
    match error {
        ModelError::Batch(_) | ModelError::Kernel(KernelError::Shape { .. }) => EngineError::Shape,
        ModelError::OutOfMemory(_) | ModelError::Kernel(KernelError::OutOfMemory { .. }) => {
            EngineError::OutOfMemory
        }
        ModelError::Kernel(KernelError::DeviceLost { .. }) => EngineError::DeviceLost,
        ModelError::BadFile(_)
        | ModelError::Unsupported(_)
        | ModelError::Io { .. }
        | ModelError::Kernel(KernelError::Unsupported { .. } | KernelError::NoDevice(_)) => {
            EngineError::NotLoaded
        }
        ModelError::Candle(_)
        | ModelError::Kernel(KernelError::Device { .. } | KernelError::Candle(_)) => {
            EngineError::Compute
        }
    }
}

/// `row` with its pending token, one of the `previous` step's results.
pub fn with_pending(row: &RowSampling, previous: &[RowResult]) -> RowSampling {
    let mut row = row.clone();
    if let Some(index) = row.pending.take() {
        let token = previous[index as usize].as_ref().map_or(0, |sampled| sampled.token);
        Arc::make_mut(&mut row.tokens).push(token);
    }
    row
}

/// `collect` was called more often than `launch`.
pub fn nothing_launched() -> EngineError {
    EngineError::Shape("nothing was launched".into())
}

/// How a scripted step fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScriptedFailure {
    /// `launch` returns an error.
    Launch,
    /// `collect` returns an error.
    Error,
    /// `collect` panics.
    Panic,
    /// Every sampled row of the step fails, the step itself does not.
    Rows,
    /// `collect` returns an error and `recover` another.
    Fatal,
}

/// A runner without a model, for tests and for measuring the node around the engine: tokens come
/// from a script, when they are collected. Log-probabilities, when asked for, say that the token
/// was certain.
pub struct ScriptedRunner {
    script: Box<dyn FnMut(&RowSampling) -> u32 + Send>,
    step_time: Duration,
    failures: HashMap<u64, ScriptedFailure>,
    /// What a scripted step fails with, if not with a text of its own.
    error: Option<EngineError>,
    depth: usize,
    steps: u64,
    fatal: bool,
    launched: VecDeque<Launched>,
    /// Of the step collected last.
    previous: Vec<RowResult>,
    /// When the step launched last is done.
    busy_until: Instant,
}

struct Launched {
    step: u64,
    rows: Vec<RowSampling>,
    done: Instant,
}

impl ScriptedRunner {
    /// `script` gives a row's next token; it may look at the row's tokens.
    pub fn new(script: impl FnMut(&RowSampling) -> u32 + Send + 'static) -> Self {
        Self {
            script: Box::new(script),
            step_time: Duration::ZERO,
            failures: HashMap::new(),
            error: None,
            depth: 1,
            steps: 0,
            fatal: false,
            launched: VecDeque::new(),
            previous: Vec::new(),
            busy_until: Instant::now(),
        }
    }

    /// Every sequence produces `output`, over and over. Must not be empty.
    pub fn repeating(output: Vec<u32>) -> Self {
        assert!(!output.is_empty(), "a script needs a token to repeat");
        Self::new(move |row| output[(row.tokens.len() - row.prompt_len) % output.len()])
    }

    /// Each step takes this long from its launch, or from the end of the one before.
    pub fn step_time(mut self, step_time: Duration) -> Self {
        self.step_time = step_time;
        self
    }

    /// Steps that may be in flight, 1 or 2.
    pub fn depth(mut self, depth: usize) -> Self {
        self.depth = depth;
        self
    }

    /// The `step`-th step, counted from 0, fails. May be called for several steps.
    pub fn fail_at(mut self, step: u64, failure: ScriptedFailure) -> Self {
        self.failures.insert(step, failure);
        self
    }

    /// Steps and rows that fail, panics aside, fail with this error.
    pub fn fail_with(mut self, error: EngineError) -> Self {
        self.error = Some(error);
        self
    }

    fn failure(&self, kind: fn(String) -> EngineError, text: String) -> EngineError {
        self.error.clone().unwrap_or_else(|| kind(text))
    }

    fn sample(&mut self, row: &RowSampling) -> Sampled {
        let row = with_pending(row, &self.previous);
        let token = (self.script)(&row);
        let certain = |top: u8| TokenLogprobs {
            chosen: 0.0,
            top: vec![(token, 0.0); usize::from(top.min(1))],
        };
        Sampled { token, logprobs: row.params.logprobs.map(certain) }
    }
}

impl Runner for ScriptedRunner {
    fn launch(&mut self, _batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        let step = self.steps;
        self.steps += 1;
        if self.failures.get(&step) == Some(&ScriptedFailure::Launch) {
            let text = format!("scripted failure to launch step {step}");
            return Err(self.failure(EngineError::Compute, text));
        }
        self.busy_until = self.busy_until.max(Instant::now()) + self.step_time;
        self.launched.push_back(Launched { step, rows: rows.to_vec(), done: self.busy_until });
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        let Launched { step, rows, done } =
            self.launched.pop_front().ok_or_else(nothing_launched)?;
        std::thread::sleep(done.saturating_duration_since(Instant::now()));
        self.previous = match self.failures.get(&step) {
            None => rows.iter().map(|row| Ok(self.sample(row))).collect(),
            Some(ScriptedFailure::Rows) => {
                let text = format!("scripted failure in step {step}");
                vec![Err(self.failure(EngineError::Sampling, text)); rows.len()]
            }
            Some(ScriptedFailure::Panic) => panic!("scripted panic in step {step}"),
            Some(failure) => {
                self.fatal = *failure == ScriptedFailure::Fatal;
                let text = format!("scripted failure of step {step}");
                return Err(self.failure(EngineError::Compute, text));
            }
        };
        Ok(self.previous.clone())
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn recover(&mut self) -> Result<(), EngineError> {
        self.launched.clear();
        if self.fatal {
            return Err(EngineError::DeviceLost("scripted end of the engine".into()));
        }
        Ok(())
    }
}

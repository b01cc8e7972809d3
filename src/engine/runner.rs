//! The seam between scheduling and tensors: the real `ModelRunner`, or a scripted one that costs nothing.

use super::sampler::{RowSampling, Sampled, TokenLogprobs};
use cresset_models::ForwardBatch;
use std::collections::HashMap;
use std::time::Duration;

/// What became of one row: its next token, or why there is none. A row's error fails its own sequence only.
pub type RowResult = Result<Sampled, String>;

/// Computes one step. A returned error, or a panic, fails every sequence of the step.
pub trait Runner: Send {
    /// `rows[i]` says how to sample from the logits of `batch.logits_indices[i]`; one result for each row.
    fn run(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<Vec<RowResult>, String>;

    /// Called after a failed step. An error means that no further step can be run, and ends the engine.
    fn recover(&mut self) -> Result<(), String> {
        Ok(())
    }
}

/// How a scripted step fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// `run` returns an error.
    Error,
    /// `run` panics.
    Panic,
    /// Every sampled row of the step fails, the step itself does not.
    Rows,
    /// `run` returns an error and `recover` another.
    Fatal,
}

/// A runner without a model, for tests and for measuring the node around the engine: tokens come from a script.
/// Log-probabilities, when asked for, say that the token was certain.
pub struct ScriptedRunner {
    script: Box<dyn FnMut(&RowSampling) -> u32 + Send>,
    step_time: Duration,
    failures: HashMap<u64, Failure>,
    steps: u64,
    fatal: bool,
}

impl ScriptedRunner {
    /// `script` gives a row's next token; it may look at the row's tokens.
    pub fn new(script: impl FnMut(&RowSampling) -> u32 + Send + 'static) -> Self {
        Self { script: Box::new(script), step_time: Duration::ZERO, failures: HashMap::new(), steps: 0, fatal: false }
    }

    /// Every sequence produces `output`, over and over. Must not be empty.
    pub fn repeating(output: Vec<u32>) -> Self {
        assert!(!output.is_empty(), "a script needs a token to repeat");
        Self::new(move |row| output[(row.tokens.len() - row.prompt_len) % output.len()])
    }

    /// Each step sleeps this long.
    pub fn step_time(mut self, step_time: Duration) -> Self {
        self.step_time = step_time;
        self
    }

    /// The `step`-th step, counted from 0, fails. May be called for several steps.
    pub fn fail_at(mut self, step: u64, failure: Failure) -> Self {
        self.failures.insert(step, failure);
        self
    }

    fn sample(&mut self, row: &RowSampling) -> Sampled {
        let token = (self.script)(row);
        let certain = |top: u8| TokenLogprobs { chosen: 0.0, top: vec![(token, 0.0); usize::from(top.min(1))] };
        Sampled { token, logprobs: row.params.logprobs.map(certain) }
    }
}

impl Runner for ScriptedRunner {
    fn run(&mut self, _batch: &ForwardBatch, rows: &[RowSampling]) -> Result<Vec<RowResult>, String> {
        if !self.step_time.is_zero() {
            std::thread::sleep(self.step_time);
        }
        let step = self.steps;
        self.steps += 1;
        match self.failures.get(&step) {
            None => Ok(rows.iter().map(|row| Ok(self.sample(row))).collect()),
            Some(Failure::Rows) => Ok(vec![Err(format!("scripted failure in step {step}")); rows.len()]),
            Some(Failure::Panic) => panic!("scripted panic in step {step}"),
            Some(failure) => {
                self.fatal = *failure == Failure::Fatal;
                Err(format!("scripted failure of step {step}"))
            }
        }
    }

    fn recover(&mut self) -> Result<(), String> {
        if self.fatal {
            return Err("scripted end of the engine".into());
        }
        Ok(())
    }
}

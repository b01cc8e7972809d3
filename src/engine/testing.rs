//! A runner without a model, for tests: tokens come from a script, and steps fail where the test
//! says so.

#![expect(clippy::disallowed_methods, reason = "a scripted step takes as long as it is told to")]

use super::error::EngineError;
use super::runner::{RowResult, Runner, nothing_launched};
use super::scheduler::EngineOptions;
use cresset_kernels::sampling::params::{RowMask, RowSampling, Sampled, TokenLogprobs};
use cresset_models::ForwardBatch;
use cresset_models::cache_kinds::CacheKinds;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The limits of an engine for tests that need any.
pub fn small_options() -> EngineOptions {
    EngineOptions {
        max_batched_tokens: 64,
        background_tokens: 16,
        max_rows: 4,
        max_waiting: 4,
        block_size: 16,
        num_blocks: 64,
        cache: CacheKinds::default(),
        max_context: 64,
        speculative_tokens: 0,
    }
}

/// Completes `row` by its pending token, which is one of the `previous` step's results.
pub fn with_pending(row: &RowSampling, previous: &[RowResult]) -> RowSampling {
    let mut row = row.clone();
    if let Some(index) = row.pending.take() {
        let token = previous[index as usize].as_ref().map_or(0, |sampled| sampled.token);
        Arc::make_mut(&mut row.tokens).push(token);
    }
    row
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

/// A runner without a model: tokens come from a script, when they are collected. Log-probabilities,
/// if asked for, say that the token was certain.
pub struct ScriptedRunner {
    script: Box<dyn FnMut(&RowSampling) -> u32 + Send>,
    step_time: Duration,
    failures: HashMap<u64, ScriptedFailure>,
    /// The error of scripted failures; `None` gives each a text of its own.
    error: Option<EngineError>,
    depth: usize,
    steps: u64,
    fatal: bool,
    launched: VecDeque<Launched>,
    /// The results of the step collected last.
    previous: Vec<RowResult>,
    /// The time at which the step launched last is done.
    busy_until: Instant,
}

struct Launched {
    step: u64,
    rows: Vec<RowSampling>,
    /// What the grammars of the rows said; `None` until they can be asked.
    masks: Option<Vec<RowMask>>,
    done: Instant,
}

/// The token, or one of those that the row's grammar allows instead. Which one changes with the
/// seed and the position.
fn allowed_or(token: u32, row: &RowSampling, mask: RowMask) -> Result<u32, EngineError> {
    let Some(mask) = mask.transpose()? else { return Ok(token) };
    let holds =
        |id: &u32| mask.get(*id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
    let allowed: Vec<u32> = (0..mask.len() as u32 * 32).filter(holds).collect();
    let place =
        row.params.seed.wrapping_add(row.position() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Ok(if holds(&token) { token } else { allowed[(place >> 33) as usize % allowed.len()] })
}

impl ScriptedRunner {
    /// Makes a runner whose `script` gives a row's next token; it may look at the row's tokens.
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

    /// Makes a runner with which every sequence produces `output`, over and over. It must not be
    /// empty.
    pub fn repeating(output: Vec<u32>) -> Self {
        assert!(!output.is_empty(), "a script needs a token to repeat");
        Self::new(move |row| output[(row.tokens.len() - row.prompt_len) % output.len()])
    }

    /// Sets how long each step takes, from its launch or from the end of the step before it.
    pub fn step_time(mut self, step_time: Duration) -> Self {
        self.step_time = step_time;
        self
    }

    /// Sets how many steps may be in flight, 1 or 2.
    pub fn depth(mut self, depth: usize) -> Self {
        self.depth = depth;
        self
    }

    /// Makes the `step`-th step, counted from 0, fail. May be called for several steps.
    pub fn fail_at(mut self, step: u64, failure: ScriptedFailure) -> Self {
        self.failures.insert(step, failure);
        self
    }

    /// Sets the error with which steps and rows fail, panics aside.
    pub fn fail_with(mut self, error: EngineError) -> Self {
        self.error = Some(error);
        self
    }

    fn failure(&self, kind: fn(String) -> EngineError, text: String) -> EngineError {
        self.error.clone().unwrap_or_else(|| kind(text))
    }

    fn draw(&mut self, row: &RowSampling, mask: RowMask) -> RowResult {
        let row = with_pending(row, &self.previous);
        let token = allowed_or((self.script)(&row), &row, mask)?;
        let certain = |top: u8| TokenLogprobs {
            chosen: 0.0,
            top: vec![(token, 0.0); usize::from(top.min(1))],
        };
        Ok(Sampled { token, logprobs: row.params.logprobs.map(certain) })
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
        assert!(self.launched.iter().all(|step| step.masks.is_some()), "a step was not sampled");
        self.busy_until = self.busy_until.max(Instant::now()) + self.step_time;
        let waits = rows.iter().any(RowSampling::awaits_mask);
        let masks = (!waits).then(|| rows.iter().map(RowSampling::mask).collect());
        let (rows, done) = (rows.to_vec(), self.busy_until);
        self.launched.push_back(Launched { step, rows, masks, done });
        Ok(())
    }

    fn sample(&mut self, rows: &[Option<RowSampling>]) -> Result<(), EngineError> {
        let last = self.launched.back_mut().filter(|step| step.masks.is_none());
        let last = last.expect("a step waits for its grammars");
        assert_eq!(last.rows.len(), rows.len());
        last.masks =
            Some(rows.iter().map(|row| row.as_ref().and_then(RowSampling::mask)).collect());
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        let Launched { step, rows, masks, done } =
            self.launched.pop_front().ok_or_else(nothing_launched)?;
        let masks = masks.expect("a step is sampled before it is collected");
        std::thread::sleep(done.saturating_duration_since(Instant::now()));
        self.previous = match self.failures.get(&step) {
            None => rows.iter().zip(masks).map(|(row, mask)| self.draw(row, mask)).collect(),
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
            return Err(EngineError::Integrity("scripted end of the engine".into()));
        }
        Ok(())
    }
}

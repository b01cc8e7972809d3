//! Decides which requests an engine refuses before it queues them (back-pressure, load shedding):
//! those that can never run, and those that would wait too long. Pure.

use super::error::EngineError;
use super::scheduler::EngineOptions;
use super::sequence::GenerateRequest;
use std::time::{Duration, Instant};

/// A sequence that would wait longer than this to start is refused, even without a deadline.
const MAX_WAIT: Duration = Duration::from_mins(5);
/// Longest `Retry-After` that is asked for: clients ignore longer ones.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(1);
/// Shortest `Retry-After`: the header counts whole seconds.
const MIN_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Why a request was refused. No part of it was started.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refused {
    #[error("the queue is full; try again in {} s", retry_after.as_secs())]
    Overloaded { retry_after: Duration },
    #[error("the engine is draining")]
    Draining,
    #[error("the sequence can never fit: {0}")]
    TooLarge(String),
    #[error("the engine has stopped: {0}")]
    Dead(EngineError),
}

/// The work that an engine has taken on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct EngineLoad {
    /// Sequences running or waiting, those in the background left out.
    pub live: usize,
    /// Tokens of all sequences that are known and not computed yet.
    pub prompt_tokens: usize,
    /// Tokens that sequences not yet running may produce.
    pub output_tokens: usize,
    /// Tokens computed per second of work; 0 before the first step.
    pub tokens_per_second: f64,
}

impl EngineLoad {
    /// Counts a request that has been queued. What runs in the background holds up no other.
    pub(crate) fn add(&mut self, request: &GenerateRequest) {
        if request.background {
            return;
        }
        self.live += 1;
        self.prompt_tokens += request.prompt.len();
        self.output_tokens += request.max_tokens as usize;
    }

    /// The longest time that a new sequence waits for its first step. When a row is free, only the
    /// prompts of others are computed before it.
    fn wait(&self, options: &EngineOptions) -> Duration {
        if self.tokens_per_second <= 0.0 {
            return Duration::ZERO;
        }
        let rows_taken = self.live >= options.max_rows;
        let outputs = if rows_taken { self.output_tokens } else { 0 };
        let seconds = (self.prompt_tokens + outputs) as f64 / self.tokens_per_second;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// Refuses a request that can never run, whatever the load.
pub(crate) fn check_size(
    options: &EngineOptions,
    request: &GenerateRequest,
) -> Result<(), Refused> {
    let prompt = request.prompt.len();
    let longest = (prompt + request.max_tokens as usize).min(options.max_context);
    let blocks = options.blocks_for(longest);
    let reason = if prompt == 0 {
        "the prompt is empty".into()
    } else if request.max_tokens == 0 {
        "max_tokens is 0".into()
    } else if prompt >= options.max_context {
        let context = options.max_context;
        format!("the prompt has {prompt} tokens and the engine's context is {context}")
    } else if blocks > options.num_blocks {
        let total = options.num_blocks;
        format!("it needs {blocks} KV blocks and there are {total}")
    } else {
        return Ok(());
    };
    Err(Refused::TooLarge(reason))
}

/// Refuses a request when the queue is full, or when it would wait past its deadline or longer than
/// `MAX_WAIT`.
pub(crate) fn check_wait(
    options: &EngineOptions,
    load: &EngineLoad,
    request: &GenerateRequest,
    now: Instant,
) -> Result<(), Refused> {
    let wait = load.wait(options);
    let longest = match request.deadline {
        Some(deadline) => deadline.saturating_duration_since(now).min(MAX_WAIT),
        None => MAX_WAIT,
    };
    let full = load.live >= options.max_rows + options.max_waiting;
    if full || wait > longest {
        let retry_after = wait.clamp(MIN_RETRY_AFTER, MAX_RETRY_AFTER);
        return Err(Refused::Overloaded { retry_after });
    }
    Ok(())
}

#[cfg(test)]
mod tests;

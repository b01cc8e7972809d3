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
    /// Tokens of all sequences that are known, not computed and not expected in the prefix cache.
    pub prompt_tokens: usize,
    /// Tokens that sequences not yet running may produce.
    pub output_tokens: usize,
    /// Tokens computed per second of work in steps with prompts; 0 before the first. Steps that
    /// only decode compute few tokens and say nothing about how long a prompt takes.
    pub prompt_tokens_per_second: f64,
    /// Tokens computed per second of work; 0 before the first step.
    pub tokens_per_second: f64,
    /// The share of the latest prompts that was in the prefix cache when they came.
    pub found_share: f64,
}

/// How much of the latest prompts was in the prefix cache when they came. A prompt's weight falls
/// by a tenth with each later one.
#[derive(Debug, Default)]
pub(crate) struct FoundShare {
    found: f64,
    tokens: f64,
}

impl FoundShare {
    const FADE: f64 = 0.9;

    /// Counts a prompt of so many `tokens`, of which the first `found` were in the cache.
    pub(crate) fn note(&mut self, found: usize, tokens: usize) {
        self.found = self.found * Self::FADE + found as f64;
        self.tokens = self.tokens * Self::FADE + tokens as f64;
    }

    /// 0 before the first prompt.
    pub(crate) fn share(&self) -> f64 {
        if self.tokens > 0.0 { self.found / self.tokens } else { 0.0 }
    }
}

impl EngineLoad {
    /// Counts a request that has been queued, and of its prompt as much as the engine did not find
    /// of the latest ones. What runs in the background holds up no other.
    pub(crate) fn add(&mut self, request: &GenerateRequest) {
        if request.background {
            return;
        }
        self.live += 1;
        let unfound = request.prompt.len() as f64 * (1.0 - self.found_share);
        self.prompt_tokens += unfound as usize;
        self.output_tokens += request.max_tokens as usize;
    }

    /// The longest time that a new sequence waits for its first step. When a row is free, only the
    /// prompts of others are computed before it.
    fn wait(&self, options: &EngineOptions) -> Duration {
        let time = |tokens: usize, rate: f64| if rate > 0.0 { tokens as f64 / rate } else { 0.0 };
        let rows_taken = self.live >= options.max_rows;
        let outputs = if rows_taken { self.output_tokens } else { 0 };
        let seconds = time(self.prompt_tokens, self.prompt_tokens_per_second)
            + time(outputs, self.tokens_per_second);
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

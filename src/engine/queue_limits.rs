//! The engine's door: what is refused before anything starts.

use super::error::EngineError;
use super::scheduler::EngineOptions;
use super::sequence::GenerateRequest;
use std::time::{Duration, Instant};

/// A sequence that would wait longer than this to start is sent away, even without a deadline.
const MAX_WAIT: Duration = Duration::from_mins(5);
/// Clients ignore a longer `Retry-After`.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(1);
const MIN_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Refused at the door; nothing was started.
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

/// The work in the engine as the door sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// Sequences running or waiting.
    pub live: usize,
    /// Tokens known and not computed, of all sequences.
    pub prompt_tokens: usize,
    /// Tokens that sequences not yet running may produce.
    pub output_tokens: usize,
    /// Tokens computed per second of work; 0 before the first step.
    pub tokens_per_second: f64,
}

impl EngineLoad {
    pub fn add(&mut self, request: &GenerateRequest) {
        self.live += 1;
        self.prompt_tokens += request.prompt.len();
        self.output_tokens += request.max_tokens as usize;
    }

    /// How long a newcomer waits for its first step at most. With a row free, only prompts are
    /// ahead of it.
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

/// Refuses what can never be run, whatever the load.
pub fn check_size(options: &EngineOptions, request: &GenerateRequest) -> Result<(), Refused> {
    let prompt = request.prompt.len();
    let longest = (prompt + request.max_tokens as usize).min(options.max_context);
    let blocks = longest.div_ceil(options.block_size);
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

/// Refuses what would only wait in vain.
pub fn check_wait(
    options: &EngineOptions,
    load: &EngineLoad,
    request: &GenerateRequest,
    now: Instant,
) -> Result<(), Refused> {
    let wait = load.wait(options);
    let patience = match request.deadline {
        Some(deadline) => deadline.saturating_duration_since(now).min(MAX_WAIT),
        None => MAX_WAIT,
    };
    let full = load.live >= options.max_rows + options.max_waiting;
    if full || wait > patience {
        let retry_after = wait.clamp(MIN_RETRY_AFTER, MAX_RETRY_AFTER);
        return Err(Refused::Overloaded { retry_after });
    }
    Ok(())
}

#[cfg(test)]
mod tests;

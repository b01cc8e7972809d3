//! The figures of an engine, for metrics and the status document.

use serde::Serialize;
use std::iter::Sum;

/// Numbers of one engine at one moment, for metrics and status. Totals count from its start.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EngineStats {
    pub running: usize,
    pub waiting: usize,
    #[serde(rename = "kv_blocks_total")]
    pub blocks_total: usize,
    #[serde(rename = "kv_blocks_used")]
    pub blocks_used: usize,
    pub steps: u64,
    /// Prompt tokens computed or taken from the prefix cache. A token that is computed again after
    /// a preemption counts once.
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub prefix_hit_tokens: u64,
    pub preemptions: u64,
    /// Tokens that were guessed and computed ahead, and those of them that were right.
    pub draft_tokens: u64,
    pub accepted_tokens: u64,
    /// Sequences that were stopped by the node.
    pub stops: u64,
    /// Stopped sequences whose blocks were held for more than two steps after the stop.
    pub late_frees: u64,
    /// Produced tokens per second over the last seconds.
    pub tokens_per_second: f64,
}

/// The numbers of several engines together.
impl Sum for EngineStats {
    fn sum<I: Iterator<Item = Self>>(engines: I) -> Self {
        engines.fold(Self::default(), |all, one| Self {
            running: all.running + one.running,
            waiting: all.waiting + one.waiting,
            blocks_total: all.blocks_total + one.blocks_total,
            blocks_used: all.blocks_used + one.blocks_used,
            steps: all.steps + one.steps,
            prompt_tokens: all.prompt_tokens + one.prompt_tokens,
            generated_tokens: all.generated_tokens + one.generated_tokens,
            prefix_hit_tokens: all.prefix_hit_tokens + one.prefix_hit_tokens,
            preemptions: all.preemptions + one.preemptions,
            draft_tokens: all.draft_tokens + one.draft_tokens,
            accepted_tokens: all.accepted_tokens + one.accepted_tokens,
            stops: all.stops + one.stops,
            late_frees: all.late_frees + one.late_frees,
            tokens_per_second: all.tokens_per_second + one.tokens_per_second,
        })
    }
}

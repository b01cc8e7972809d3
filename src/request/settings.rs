//! The limits of accounts on a plan.

use cresset_base::section;

section! {
/// Limits of an account on this plan; all its credentials share them.
pub struct Plan {
    /// Completion requests a minute.
    #[schemars(range(min = 1, max = 1 << 24))]
    pub requests_per_minute: u32 = 120,
    /// Completion requests that may come at once after a pause.
    #[schemars(range(min = 1, max = 1 << 24))]
    pub burst: u32 = 60,
    /// Requests in flight at once.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub max_concurrent: u32 = 64,
    /// Ceiling on prompt plus output, tokens. Absent: the model's.
    #[schemars(range(min = 0, max = u32::MAX))]
    pub context_tokens: Option<u32> = None,
    /// Ceiling on output, tokens. Absent: the model's.
    #[schemars(range(min = 0, max = u32::MAX))]
    pub max_output_tokens: Option<u32> = None,
    /// Tokens of prompts and answers in a day (UTC) of an account, what running requests may take
    /// included. Absent: no limit.
    #[schemars(range(min = 0, max = 1_u64 << 52))]
    pub tokens_per_day: Option<u64> = None,
    /// As `tokens_per_day`, in a month (UTC).
    #[schemars(range(min = 0, max = 1_u64 << 52))]
    pub tokens_per_month: Option<u64> = None,
    /// Priority of the plan's requests when there are more than can run; higher ones start first. A
    /// request rises while it waits, so every request is served in the end.
    #[schemars(range(min = 0, max = 9))]
    pub priority: u8 = 0,
    /// Models (by name or id) the plan may use. Absent: all.
    pub models: Option<Vec<String>> = None,
    /// Whether answers may be kept to a JSON schema, a regular expression, a choice or a grammar.
    pub structured_output: bool = true,
    /// Whether models that were qualified with tools may call them.
    pub tools: bool = true,
    /// Whether what a model thinks is told apart from its answer.
    pub reasoning: bool = true,
}
}

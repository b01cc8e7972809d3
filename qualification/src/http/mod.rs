//! Checks of generation over HTTP: what a client of the completions surface gets. The same checks
//! ask the node's own surface and any other endpoint that speaks OpenAI's dialect.
//!
//! What a foreign endpoint does not offer is `not_run`. Its arithmetic is not this engine's either,
//! so its greedy text may differ where the reference leads by less than `margin.foreign` in
//! `policy.toml`.

mod client;
mod endpoint_report;
mod limits;
mod parameters;
mod reference;
mod streams;
#[cfg(test)]
mod tests;

use crate::checks::Check;

pub use endpoint_report::EndpointReport;

pub(crate) const PROMPT_TOKENS: Check = Check {
    id: "prompt_tokens",
    stage: "S6",
    proves: "over HTTP, a prompt has as many tokens as the reference's: no other template",
    run: reference::prompt_tokens,
};
pub(crate) const HTTP_GOLDENS: Check = Check {
    id: "http_goldens",
    stage: "S6",
    proves: "over HTTP, the greedy text is the reference's, wherever its margin is decisive",
    run: reference::greedy_text,
};
pub(crate) const HTTP_LOGPROBS: Check = Check {
    id: "http_logprobs",
    stage: "S6",
    proves: "over HTTP, log-probabilities are the model's own, before any sampling parameter",
    run: reference::logprobs,
};
pub(crate) const HTTP_SPECIAL_TEXT: Check = Check {
    id: "http_special_text",
    stage: "S6",
    proves: "over HTTP, special tokens written by a user stay text",
    run: reference::special_text,
};
pub(crate) const LENGTH_LIMIT: Check = Check {
    id: "length_limit",
    stage: "S6",
    proves: "over HTTP, max_tokens is exact",
    run: limits::length,
};
pub(crate) const PROMPT_TOO_LONG: Check = Check {
    id: "prompt_too_long",
    stage: "S6",
    proves: "over HTTP, a prompt over the context is refused, never cut",
    run: limits::prompt_too_long,
};
pub(crate) const USAGE: Check = Check {
    id: "usage",
    stage: "S6",
    proves: "over HTTP, the tokens that are billed are the tokens that were used",
    run: limits::usage,
};
pub(crate) const END_OF_TEXT: Check = Check {
    id: "end_of_text",
    stage: "S6",
    proves: "over HTTP, every end-of-text id ends the answer and none shows in it",
    run: limits::end_of_text,
};
pub(crate) const STOP_STRING: Check = Check {
    id: "stop_string",
    stage: "S6",
    proves: "over HTTP, a stop string across tokens ends the answer exactly before it",
    run: streams::stop_string,
};
pub(crate) const STREAM_JOIN: Check = Check {
    id: "stream_join",
    stage: "S6",
    proves: "over HTTP, streamed pieces are whole characters and join to the plain answer",
    run: streams::join,
};
pub(crate) const HTTP_SEEDS: Check = Check {
    id: "http_seeds",
    stage: "S6",
    proves: "over HTTP, a seed gives the same answer again, and another seed another one",
    run: parameters::seeds,
};
pub(crate) const PARAMETERS: Check = Check {
    id: "parameters",
    stage: "S6",
    proves: "over HTTP, every sampling parameter that is taken changes what it claims to",
    run: parameters::effects,
};

/// The checks that need a completions surface and nothing else, in the order they run.
pub const CHECKS: &[Check] = &[
    PROMPT_TOKENS,
    HTTP_GOLDENS,
    HTTP_LOGPROBS,
    HTTP_SPECIAL_TEXT,
    LENGTH_LIMIT,
    PROMPT_TOO_LONG,
    USAGE,
    END_OF_TEXT,
    STOP_STRING,
    STREAM_JOIN,
    HTTP_SEEDS,
    PARAMETERS,
];

//! What a request has come to, for the surface that renders it.

use super::transcript::TokenScores;
use cresset_base::{ModelId, RequestId, UnixMillis};
use cresset_ledger::{FinishReason, Microcredits, Usage};
use cresset_text::ReadCall;

/// A complete answer, before its surface renders it.
#[derive(Clone, Debug)]
pub struct CompleteAnswer {
    pub id: RequestId,
    pub model: ModelId,
    pub created_at: UnixMillis,
    pub text: String,
    /// What the model thought; `None` of one that does not think.
    pub thought: Option<Thought>,
    pub calls: Vec<ReadCall>,
    /// Scores of all tokens, if they were asked for.
    pub scores: Option<Vec<TokenScores>>,
    pub reason: FinishReason,
    pub usage: Usage,
    pub charged: Microcredits,
}

/// The part of an answer in which its model thought.
#[derive(Clone, Debug)]
pub struct Thought {
    pub text: String,
    /// A part of the output tokens.
    pub tokens: u32,
}

//! Why a request gets no answer, independent of any surface. Each surface has its own texts for
//! clients.

use cresset_engine::Refused;
use cresset_ledger::{FailureCode, Refusal};
use cresset_store::StoreError;
use std::time::Duration;

/// The time after which a client is told to try again if no better time is known.
pub(super) const SOON: Duration = Duration::from_secs(1);

/// A refusal before anything ran, or the failure that ended an attempt. None of them charges
/// anything, except that a request which was cancelled, or whose format cost too much, pays for
/// what was computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// The account's plan does not have the model, or the node does not serve it.
    #[error("the model is not available to this account")]
    ModelNotFound,
    /// More output was asked for than model and plan allow, tokens.
    #[error("at most {limit} output tokens are allowed")]
    OutputAboveLimit { limit: u32 },
    /// Prompt and output together are longer than the context, all in tokens. The output is 0 where
    /// the client named no limit and the prompt leaves no room.
    #[error("{prompt} prompt and {output} output tokens are more than {limit}")]
    ContextExceeded { limit: u32, prompt: u32, output: u32 },
    #[error("more tokens are required than the {max_tokens} that are allowed")]
    MinTokensAboveMax { max_tokens: u32 },
    /// A logit bias names a token id that the vocabulary, of this many tokens, does not have.
    #[error("a biased token is outside of the vocabulary of {vocabulary}")]
    UnknownToken { vocabulary: usize },
    /// The model's chat template refuses the conversation; the text says why.
    #[error("{0}")]
    TemplateRefused(String),
    /// This field asks for what the model, the plan or the node does not do.
    #[error("{field} {why}")]
    FieldRefused { field: String, why: String },
    /// The engine's whole KV cache is too small for prompt and output.
    #[error("prompt and output together never fit the engine")]
    NeverFits,
    /// The account's stored answers, with what its running requests and this one may add, would
    /// take more than this many MiB.
    #[error("the account's stored answers may take {limit_mib} MiB")]
    StoredAnswersFull { limit_mib: u64 },
    /// A rule of the ledger refuses: credits, concurrency, credential, or an id that was used
    /// before.
    #[error(transparent)]
    Ledger(#[from] Refusal),
    /// The request runs and cannot be joined, or is about to end.
    #[error("the request is in progress")]
    InProgress,
    #[error("the request was cancelled")]
    Cancelled,
    #[error("there is more work than the node can take")]
    Overloaded { retry_after: Duration },
    #[error("the node is shutting down")]
    Draining,
    #[error("the request did not finish within its time limit")]
    DeadlineExceeded,
    #[error("the generation failed on the node's side")]
    GenerationFailed,
    /// The format of the answer came to cost more than it may, while the answer was made.
    #[error("the answer's format cost more than it may")]
    FormatTooCostly,
    /// The ledger cannot confirm what it stores. The same request may be sent again.
    #[error("the ledger cannot be reached")]
    LedgerUnavailable,
}

impl RequestError {
    pub fn refused(field: &str, why: impl Into<String>) -> Self {
        Self::FieldRefused { field: field.to_owned(), why: why.into() }
    }
}

impl From<Refused> for RequestError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Overloaded { retry_after } => Self::Overloaded { retry_after },
            Refused::Draining => Self::Draining,
            Refused::TooLarge(_) => Self::NeverFits,
            Refused::Dead(_) => Self::GenerationFailed,
        }
    }
}

impl From<StoreError> for RequestError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Refused(refusal) => Self::Ledger(refusal),
            StoreError::Overloaded => Self::Overloaded { retry_after: SOON },
            StoreError::Unavailable(_) | StoreError::Unusable(_) | StoreError::InUse(_) => {
                Self::LedgerUnavailable
            }
        }
    }
}

impl From<FailureCode> for RequestError {
    fn from(failure: FailureCode) -> Self {
        match failure {
            FailureCode::GenerationFailed | FailureCode::NodeRestarted => Self::GenerationFailed,
            FailureCode::DeadlineExceeded => Self::DeadlineExceeded,
            FailureCode::Overloaded => Self::Overloaded { retry_after: SOON },
            FailureCode::Draining => Self::Draining,
            FailureCode::ControlPlaneUnavailable => Self::LedgerUnavailable,
            FailureCode::FormatTooCostly => Self::FormatTooCostly,
        }
    }
}

//! Why a command has no outcome.

use super::commands::{Outcome, Refusal};
use super::state::StateError;

/// The reason why a command has no outcome.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The state, or the command, breaks a rule that always holds. Nothing was written and nothing
    /// may be repaired.
    #[error(transparent)]
    Violated(#[from] Violation),
    /// The transaction must be abandoned.
    #[error(transparent)]
    State(#[from] StateError),
}

pub(super) type ApplyResult<T = Outcome> = Result<T, ApplyError>;

/// A rule that does not hold, and the row that breaks it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{rule}: {subject}")]
pub struct Violation {
    pub rule: &'static str,
    pub subject: String,
}

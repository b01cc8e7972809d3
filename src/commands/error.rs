//! Why a command fails.

use cresset_ledger::Refusal;
use cresset_store::StoreError;
use serde::{Deserialize, Serialize};

/// Why a command failed; the text says what to do about it. It is sent over the operator socket as
/// it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "code", content = "message", rename_all = "snake_case")]
pub enum AdminError {
    #[error("{0}")]
    NotFound(String),
    /// The command contradicts what is stored; nothing was written.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    Unavailable(String),
    /// The node takes commands once it has started.
    #[error("{0}")]
    Starting(String),
    /// No valid token came with the command.
    #[error("{0}")]
    Unauthorized(String),
    /// Whoever gives the command may not.
    #[error("{0}")]
    Forbidden(String),
}

impl From<StoreError> for AdminError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Refused(refusal) => refusal.into(),
            StoreError::Unavailable(_)
            | StoreError::Overloaded
            | StoreError::Unusable(_)
            | StoreError::InUse(_) => Self::Unavailable(error.to_string()),
        }
    }
}

impl From<Refusal> for AdminError {
    fn from(refusal: Refusal) -> Self {
        let hint = match refusal {
            Refusal::AccountNotFound => "`cresset accounts list` shows those there are",
            Refusal::ApplicationNotFound => "`cresset applications list` shows those there are",
            Refusal::CredentialNotFound => "`cresset keys list --account ID` shows those there are",
            Refusal::RequestNotFound => {
                "`cresset requests list --account ID` shows those there are"
            }
            Refusal::ReferenceReused => {
                "each grant or debit has a reference of its own: choose another --reference"
            }
            Refusal::DebitTooLarge { .. } => "take less, or wait until running requests have ended",
            Refusal::AmountOverflow => "grant a smaller amount",
            _ => return Self::Refused(refusal.to_string()),
        };
        let text = format!("{refusal}: {hint}");
        match refusal {
            Refusal::ReferenceReused | Refusal::DebitTooLarge { .. } | Refusal::AmountOverflow => {
                Self::Refused(text)
            }
            _ => Self::NotFound(text),
        }
    }
}

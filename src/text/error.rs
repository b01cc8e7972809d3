//! Why text cannot be read or written.

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Tokenizer or template files are missing, damaged or of an unknown kind.
    #[error("{0}")]
    BadFile(String),
    /// The template refused the conversation (its `raise_exception`), e.g. roles out of order. Safe
    /// to show to the client.
    #[error("the model's chat template refused the messages: {0}")]
    TemplateRefused(String),
    #[error("{0}")]
    Internal(String),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

//! Asks a node for completions, over the network, over its operator's socket or inside its process.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod api_client;
mod http;

pub use api_client::{AnswerStream, ApiClient, ChatAnswer, completion};
pub use http::{HttpCall, accepted, json, refusal};

use std::fmt::Display;

/// Why a node could not be asked, or did not do what it was asked, and what helps.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{what}")]
pub struct ClientError {
    pub what: String,
    pub remedy: Option<String>,
}

impl ClientError {
    pub fn new(what: impl Display) -> Self {
        Self { what: what.to_string(), remedy: None }
    }

    #[must_use]
    pub fn remedy(self, remedy: impl Display) -> Self {
        Self { remedy: Some(remedy.to_string()), ..self }
    }
}

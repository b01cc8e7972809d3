//! What the node's own gateway is told of a prompt.

use serde::{Deserialize, Serialize};

#[derive(Debug, Deserialize, Serialize)]
pub struct TokenCount {
    pub prompt_tokens: usize,
}

#[derive(Debug, Deserialize, Serialize)]
pub struct PromptTokens {
    pub tokens: Vec<u32>,
    /// Of each token.
    pub pieces: Vec<TokenPiece>,
    /// The longest prompt and answer together, tokens.
    pub context_tokens: u32,
}

/// The text of a token, or its bytes where they are a part of a character.
#[derive(Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub enum TokenPiece {
    Text(String),
    Bytes(Vec<u8>),
}

impl From<Vec<u8>> for TokenPiece {
    fn from(bytes: Vec<u8>) -> Self {
        String::from_utf8(bytes).map_or_else(|no| Self::Bytes(no.into_bytes()), Self::Text)
    }
}

#[derive(Debug, Deserialize, Serialize)]
pub struct PromptText {
    pub text: String,
}

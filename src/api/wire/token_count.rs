//! The answer to a count of a prompt's tokens, which the node's own gateway reads.

use serde::{Deserialize, Serialize};

#[derive(Debug, Deserialize, Serialize)]
pub struct TokenCount {
    pub prompt_tokens: usize,
}

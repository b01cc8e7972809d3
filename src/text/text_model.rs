//! The textual side of one release.

use crate::chat_template::ChatTemplate;
use crate::forms::tool_calls::CallFormat;
use crate::grammar::compile::GrammarsOnce;
use crate::reader::reasoning::ThinkingMarks;
use crate::tokenizer::{SpecialTokens, Tokenizer};

/// Tokenizer, chat template and end-of-text ids of one release. Requests share it by reference.
pub struct TextModel {
    pub tokenizer: Tokenizer,
    pub template: ChatTemplate,
    /// How the model marks what it thinks; `None` for one that does not.
    pub thinking: Option<ThinkingMarks>,
    /// How the model writes calls of tools; `None` where its template has no form that is known.
    pub calls: Option<CallFormat>,
    /// The tokens that no text of a client may become: the special ones, and those that the
    /// template writes.
    pub(crate) markup: SpecialTokens,
    /// Ids of the tokens that the template writes or that end a generation, ascending.
    pub markup_ids: Vec<u32>,
    /// Ids that end a generation: the union of generation config, tokenizer and template,
    /// ascending.
    pub eos_ids: Vec<u32>,
    /// BLAKE3 of the GGUF header that this was read from. A load of the weights checks the digest
    /// of the whole file, this one tells that both read the same.
    pub header_blake3: Option<String>,
    pub(crate) grammars: GrammarsOnce,
}

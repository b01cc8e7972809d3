//! Converts text to token ids and back: tokenizer, chat template, streaming detokenizer, stop
//! strings, formats of answers, thoughts and calls of tools.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

pub mod answer_reader;
mod bounded;
pub mod call_reader;
mod channels;
pub mod chat_template;
#[cfg(test)]
mod fuzz;
mod gguf;
pub mod grammar;
mod jinja;
mod lark;
mod literal_arguments;
mod literal_reader;
mod load;
mod pre_tokenizer;
mod prompt;
pub mod reasoning;
mod settings;
pub mod stop;
mod tagged_arguments;
#[cfg(test)]
mod testing;
pub mod tokenizer;
pub mod tool_format;
pub mod tools;

pub use answer_reader::AnswerReader;
pub use bounded::{TemplateLimits, Unwanted};
pub use call_reader::AnswerPart;
pub use chat_template::{ChatMessage, ChatTemplate, PromptExtras};
pub use grammar::{AnswerFormat, CompiledGrammar, FormatRefused, GrammarPlace};
pub use settings::TemplateSettings;
pub use stop::StopMatcher;
pub use tokenizer::{Detokenizer, Tokenizer};

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

/// Tokenizer, chat template and end-of-text ids of one release. Requests share it by reference.
pub struct TextModel {
    pub tokenizer: Tokenizer,
    pub template: ChatTemplate,
    /// How the model marks what it thinks; `None` for one that does not.
    pub thinking: Option<reasoning::ThinkingMarks>,
    /// How the model writes calls of tools; `None` where its template has no form that is known.
    pub calls: Option<tool_format::CallFormat>,
    /// The tokens that no text of a client may become: the special ones, and those that the
    /// template writes.
    markup: tokenizer::SpecialTokens,
    /// Ids of the tokens that the template writes or that end a generation, ascending.
    pub markup_ids: Vec<u32>,
    /// Ids that end a generation: the union of generation config, tokenizer and template,
    /// ascending.
    pub eos_ids: Vec<u32>,
    /// BLAKE3 of the GGUF header that this was read from. A load of the weights checks the digest
    /// of the whole file, this one tells that both read the same.
    pub header_blake3: Option<String>,
    grammars: grammar::GrammarsOnce,
}

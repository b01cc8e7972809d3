//! Converts text to token ids and back: tokenizer, chat template, streaming detokenizer, stop
//! strings, and answers: constrained decoding, reasoning and tool calls.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod bounded;
mod call_family;
mod chat_template;
mod error;
mod forms;
#[cfg(test)]
mod fuzz;
mod gguf;
mod grammar;
mod jinja;
mod load;
mod pre_tokenizer;
mod prompt;
mod raw_prompt;
mod reader;
mod settings;
mod stop;
#[cfg(test)]
mod testing;
mod text_model;
mod tokenizer;

pub use bounded::{TemplateLimits, Unwanted};
pub use call_family::WrittenExchange;
pub use chat_template::{ChatMessage, ChatTemplate, PromptExtras};
pub use error::{Error, Result};
pub use forms::reasoning::{ThinkingEffort, ThinkingMarks, ThinkingStart};
pub use forms::tool_calls::{CallForm, MOST_CALLS, ToolDefinition, is_of_name};
pub use grammar::{
    AnswerFormat, CallRule, CheckedSchema, CompiledGrammar, FormatRefused, FormatTag, GrammarPlace,
    SchemaFormat, SchemaRefused, TagContent, TaggedText,
};
pub use raw_prompt::{ProjectFile, RawPrompt};
pub use reader::{AnswerPart, AnswerReader, ReadCall};
pub use settings::{FormatSettings, TemplateSettings};
pub use stop::StopMatcher;
pub use text_model::TextModel;
pub use tokenizer::{Detokenizer, Tokenizer};

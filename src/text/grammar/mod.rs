//! Grammars for constrained decoding: formats that an answer keeps to, and the formats of answers
//! with tool calls and reasoning, made from the forms of families.

mod answer_format;
mod compile;
mod endless;
mod gbnf;
mod lark;
mod literals;
mod parameters;
mod schema;
mod tagged;
mod tagged_text;
mod tool_calls;
mod trial;

pub use answer_format::{AnswerFormat, FormatRefused, SchemaFormat};
pub(crate) use compile::Grammars;
pub use compile::{CompiledGrammar, GrammarPlace};
pub(crate) use lark::{after_thinking, in_last_message};
pub use schema::{CheckedSchema, SchemaRefused};
pub use tagged_text::{FormatTag, TagContent, TaggedText};
pub use tool_calls::CallRule;

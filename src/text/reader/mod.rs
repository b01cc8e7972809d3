//! Readers of answers while their tokens come: they separate reasoning, content and tool calls by
//! the forms of families.

mod answer;
mod arguments;
mod channels;
mod held;
mod literals;
mod part;
mod reasoning;
mod tool_calls;
mod unmarked;

pub use answer::AnswerReader;
pub(crate) use answer::read_calls;
pub use part::{AnswerPart, ReadCall};

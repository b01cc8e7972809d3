//! How families of models write their answers (tool calls, reasoning, channels), and how they are
//! asked to fill in a text. These are tables. They know neither the grammars of constrained
//! decoding nor the readers of answers.

pub(crate) mod channels;
pub(crate) mod fill_in;
pub(crate) mod reasoning;
pub(crate) mod tool_calls;

//! How families of models write their answers.

pub(crate) mod tool_calls;

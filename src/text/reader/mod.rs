//! Readers of answers while their tokens come.

pub(crate) mod answer;
pub(crate) mod channels;
pub(crate) mod literals;
pub(crate) mod reasoning;
pub(crate) mod tool_calls;

//! Grammars for constrained decoding.

pub(crate) mod compile;
pub(crate) mod lark;
pub(crate) mod literals;
pub(crate) mod tagged;

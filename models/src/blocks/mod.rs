//! Blocks that architectures are composed of.

pub mod attention;
pub mod feed_forward;
pub mod mixture;
pub mod mlp;

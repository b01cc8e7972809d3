//! Blocks that architectures are composed of.

pub mod attention;
pub mod mlp;

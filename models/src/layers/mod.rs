//! Blocks that architectures are composed of.

pub mod attention;
pub mod decoder;
pub mod mlp;
pub mod rope;
pub mod workspace;

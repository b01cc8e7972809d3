//! Blocks that architectures are composed of.

pub mod attention;
pub mod feed_forward;
pub mod latent_attention;
pub mod mixer;
pub mod mixture;
pub mod mlp;
pub mod recurrence;
pub mod short_conv;

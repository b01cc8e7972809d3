//! Constrained decoding: what an answer that keeps to a format needs of the engine. Pure.

use cresset_kernels::sampling::params::TokenMask;
use std::fmt::Debug;
use std::sync::Arc;

/// The grammar of an answer, ready for any number of sequences.
pub trait TokenGrammar: Debug + Send + Sync {
    /// The place of a new sequence in the grammar. What it allows depends on the sequence's output
    /// alone, so that an answer is the same in any company.
    fn begin(&self) -> Arc<dyn TokenMask>;
}

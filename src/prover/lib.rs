//! Proves releases on this machine: drives a node's own engine for the qualification suite, as a
//! request would, and keeps the record.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod endpoint;
mod http_client;
mod load;
mod private_surface;
mod qualify;
mod rerun;
mod scoring;
#[cfg(feature = "self-test")]
mod self_test;
mod subject;
#[cfg(test)]
mod tests;

pub use endpoint::Endpoint;
pub use load::UnqualifiedModel;
pub use rerun::RerunOutcome;

use cresset_node::Assembly;
use std::ops::Deref;

/// Qualifies releases with the parts that a node is assembled from.
pub struct Prover<'a>(pub &'a Assembly);

impl Deref for Prover<'_> {
    type Target = Assembly;

    fn deref(&self) -> &Assembly {
        self.0
    }
}

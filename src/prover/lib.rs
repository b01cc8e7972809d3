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

mod background;
mod collector;
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

pub use background::BackgroundProver;
pub use endpoint::Endpoint;
pub use load::UnqualifiedModel;
pub use rerun::RerunOutcome;

use cresset_node::config::Config;
use cresset_node::{Assembly, NodeError};
use cresset_qualification::Suite;
use scoring::Scoring;
use std::ops::Deref;
use std::path::Path;

/// Qualifies releases with the parts that a node is assembled from.
pub struct Prover<'a>(pub &'a Assembly);

impl Deref for Prover<'_> {
    type Target = Assembly;

    fn deref(&self) -> &Assembly {
        self.0
    }
}

/// Proves a release of the data folder for the program that calls this, on this hardware, unless a
/// valid record does already. A record is that of one executable, so that a program which embeds a
/// node has records of its own. It runs the quick suite, which takes minutes.
pub async fn ensure_qualified(
    data_dir: &Path,
    config: &Config,
    release: &str,
) -> Result<(), NodeError> {
    let (data_dir, config, release) = (data_dir.to_owned(), config.clone(), release.to_owned());
    let proving = move || {
        let assembly = Assembly::new(data_dir, config)?;
        let manifest = assembly.catalogue().find(&release).map_err(NodeError::new)?;
        if assembly.qualified(&manifest, &assembly.host()).is_err() {
            Prover(&assembly).qualify(&manifest, Suite::Quick, None, &mut |_| ())?;
        }
        // It says which check failed, or what is still missing.
        assembly.qualified(&manifest, &assembly.host()).map(drop).map_err(NodeError::new)
    };
    tokio::task::spawn_blocking(proving).await.map_err(NodeError::new)?
}

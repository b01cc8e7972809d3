//! The prices that a release has had: a file beside its manifest, with each change that the node
//! took note of.

use super::folder::{ReleaseFolder, write_whole};
use super::{Catalogue, Error, Manifest, Result};
use cresset_base::UnixMillis;
use cresset_ledger::Prices;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::ErrorKind;

/// Name of the file in a release's folder.
pub const PRICE_HISTORY: &str = "prices.json";

/// Prices, and when the node took note of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotedPrices {
    pub prices: Prices,
    /// Milliseconds since the Unix epoch.
    pub noted_at: UnixMillis,
}

impl Catalogue {
    /// Writes down the prices of a manifest, unless they are the ones that were noted last.
    pub fn note_prices(&self, manifest: &Manifest, at: UnixMillis) -> Result<()> {
        let folder = self.folder(&manifest.name);
        let _lock = folder.lock()?;
        folder.note_prices(manifest.prices, at)
    }

    /// The prices of a release that were noted, oldest first.
    pub fn price_history(&self, name: &str) -> Result<Vec<NotedPrices>> {
        self.folder(name).price_history()
    }
}

impl ReleaseFolder {
    pub(super) fn note_prices(&self, prices: Prices, at: UnixMillis) -> Result<()> {
        let mut history = self.price_history()?;
        if history.last().is_some_and(|last| last.prices == prices) {
            return Ok(());
        }
        history.push(NotedPrices { prices, noted_at: at });
        let text = serde_json::to_string_pretty(&history).expect("invariant: prices are JSON");
        write_whole(&self.path().join(PRICE_HISTORY), text.as_bytes())
    }

    fn price_history(&self) -> Result<Vec<NotedPrices>> {
        let path = self.path().join(PRICE_HISTORY);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Error::io("read", &path)(error)),
        };
        serde_json::from_str(&text).map_err(|error| Error::BadManifest {
            origin: path.display().to_string(),
            why: format!("{error}; move the file away to begin another history"),
        })
    }
}

//! When the node and its ledger were backed up last: a small file of the data folder, so that it is
//! known after a restart, and after a backup that was made while no node ran.

use cresset_base::{UnixMillis, durable_file};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Name of the file in the data folder.
const LAST_BACKUPS: &str = "last-backups.json";

pub(super) struct LastBackups {
    path: PathBuf,
}

impl LastBackups {
    pub(super) fn of(data_dir: &Path) -> Self {
        Self { path: data_dir.join(LAST_BACKUPS) }
    }

    /// The last backup of each kind, `node` and `ledger`; null where none is known.
    pub(super) fn read(&self) -> Value {
        let kept = fs::read(&self.path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let kept: Value = kept.unwrap_or_default();
        json!({ "node": kept["node"], "ledger": kept["ledger"] })
    }

    /// A backup is good whether this is known or not, so a failure is only logged.
    pub(super) fn note(&self, kind: &str, bytes: u64, at: UnixMillis) {
        let mut kept = self.read();
        kept[kind] = json!({ "at": at.seconds(), "bytes": bytes });
        let written = durable_file::replace(&self.path, kept.to_string().as_bytes(), None);
        if let Err(error) = written {
            tracing::warn!(%error, "the time of a backup could not be written down");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_keeps_its_last_time() {
        let folder = tempfile::tempdir().unwrap();
        let backups = LastBackups::of(folder.path());
        assert_eq!(backups.read(), json!({ "node": null, "ledger": null }));
        backups.note("node", 5, UnixMillis(1_000));
        backups.note("ledger", 6, UnixMillis(2_000));
        backups.note("node", 7, UnixMillis(3_000));
        let known = LastBackups::of(folder.path()).read();
        assert_eq!(known["node"], json!({ "at": 3, "bytes": 7 }));
        assert_eq!(known["ledger"], json!({ "at": 2, "bytes": 6 }));
        fs::write(folder.path().join(LAST_BACKUPS), "{").unwrap();
        assert_eq!(backups.read()["node"], Value::Null);
    }
}

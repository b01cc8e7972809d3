//! What a backup holds, and how much of it a restore puts in place.

use serde::{Deserialize, Serialize};
use std::path::{Component, Path, PathBuf};

/// A small file of the node, such as its configuration or a model's manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFile {
    /// Its place in the data folder, relative to it.
    pub name: PathBuf,
    /// Where it is read.
    pub path: PathBuf,
}

/// What a backup holds beside accounts, requests and the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackupScope {
    /// Nothing more: a restored node knows which requests it answered and no answer.
    Ledger,
    /// The stored answers, and these files.
    Node(Vec<NodeFile>),
}

/// What of a backup a restore puts in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreScope {
    /// The ledger and, if the backup holds any, the answers.
    Ledger,
    /// The files too.
    Node,
}

/// Whether a backup may put a file in this place: one below the data folder, of a kind that the
/// ledger has none of.
pub(super) fn is_allowed(name: &Path) -> bool {
    let inside = name.components().all(|part| matches!(part, Component::Normal(_)));
    let kind = name.extension().and_then(|kind| kind.to_str());
    inside && matches!(kind, Some("toml" | "json" | "acceptance" | "key" | "keys"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backup_writes_nothing_outside_of_the_folder_and_nothing_of_the_ledger() {
        let names = [
            ("cresset.toml", true),
            ("models/tiny/manifest.toml", true),
            ("qualification/tiny/1.json", true),
            ("qualification/tiny/1.acceptance", true),
            ("/etc/cresset.toml", false),
            ("../cresset.toml", false),
            ("models/../../cresset.toml", false),
            ("./cresset.toml", false),
            ("ledger.redb", false),
            ("lock", false),
            ("node.key", true),
            ("node.keys", true),
            ("operator.sock", false),
            ("", false),
        ];
        for (name, expect) in names {
            assert_eq!(is_allowed(Path::new(name)), expect, "{name}");
        }
    }
}

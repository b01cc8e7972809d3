//! The small files of a node that a backup holds beside the ledger: what an operator wrote or a
//! qualification proved, and a new machine needs.

use super::NodeError;
use cresset_catalogue::{NODE_KEY, NODE_KEYS, PRICE_HISTORY};
use cresset_store::NodeFile;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The configuration's name in a data folder.
pub const CONFIG: &str = "cresset.toml";

/// The configuration in use, manifest and prices of every release, the records of qualifications,
/// the operator's acceptances, and the node's keys, without which they would count for nothing.
pub fn to_back_up(data_dir: &Path, config: Option<&Path>) -> Result<Vec<NodeFile>, NodeError> {
    let config = config.map(|path| NodeFile { name: CONFIG.into(), path: path.to_owned() });
    let keys = [NODE_KEY, NODE_KEYS].into_iter().filter_map(|name| own(data_dir, name.into()));
    let mut files: Vec<_> = config.into_iter().chain(keys).collect();
    for release in names(data_dir, Path::new("models"))? {
        let names = ["manifest.toml", PRICE_HISTORY];
        files.extend(names.into_iter().filter_map(|name| own(data_dir, release.join(name))));
    }
    for release in names(data_dir, Path::new("qualification"))? {
        let records = names(data_dir, &release)?.into_iter();
        let records = records.filter(|name| {
            name.extension().is_some_and(|kind| kind == "json" || kind == "acceptance")
        });
        files.extend(records.filter_map(|name| own(data_dir, name)));
    }
    Ok(files)
}

/// The file of this name, if there is one.
fn own(data_dir: &Path, name: PathBuf) -> Option<NodeFile> {
    let path = data_dir.join(&name);
    path.is_file().then_some(NodeFile { name, path })
}

/// The names in a folder of the data folder, each with the folder's.
fn names(data_dir: &Path, folder: &Path) -> Result<Vec<PathBuf>, NodeError> {
    let path = data_dir.join(folder);
    let entries = match fs::read_dir(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => return Ok(Vec::new()),
        other => other,
    };
    let names = entries.and_then(|entries| {
        entries.map(|entry| Ok(folder.join(entry?.file_name()))).collect::<io::Result<Vec<_>>>()
    });
    names.map_err(|error| NodeError::new(format!("{} cannot be listed: {error}", path.display())))
}

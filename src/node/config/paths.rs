//! Folders and files by the platform's convention, and other facts that the environment gives about
//! this process.

#![expect(clippy::disallowed_methods, reason = "this file finds folders by the environment")]

use std::path::PathBuf;

/// The data folder when none is given: the platform's convention, or `CRESSET_DATA_DIR`.
pub fn default_data_dir() -> PathBuf {
    if let Some(dir) = std::env::var_os("CRESSET_DATA_DIR") {
        return dir.into();
    }
    match directories::ProjectDirs::from("", "", "cresset") {
        Some(dirs) => dirs.data_dir().to_owned(),
        None => PathBuf::from("cresset-data"),
    }
}

/// The folder for measurements that can be made again, by the platform's convention.
pub fn cache_dir() -> PathBuf {
    match directories::ProjectDirs::from("", "", "cresset") {
        Some(dirs) => dirs.cache_dir().to_owned(),
        None => std::env::temp_dir().join("cresset-cache"),
    }
}

/// The configuration file when none is given: `CRESSET_CONFIG`.
pub fn default_config_file() -> Option<PathBuf> {
    std::env::var_os("CRESSET_CONFIG").map(PathBuf::from)
}

/// The key with which commands talk to a node as its clients do, when none is given: `CRESSET_KEY`.
pub fn client_key() -> Option<String> {
    std::env::var("CRESSET_KEY").ok().filter(|key| !key.is_empty())
}

/// The token with which commands reach a node on another machine: `CRESSET_OPERATOR_TOKEN`.
pub fn operator_token() -> Option<String> {
    key_in("CRESSET_OPERATOR_TOKEN")
}

/// The key that a variable holds, whose name the user gave.
pub fn key_in(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|key| !key.is_empty())
}

/// False when the user asked every program for plain text: a `NO_COLOR` that is not empty, or a
/// dumb terminal.
pub fn colours_allowed() -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    !refused && !dumb
}

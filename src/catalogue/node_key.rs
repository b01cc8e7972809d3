//! The key with which a node signs its qualification records and receipts, so that only what was
//! signed here counts here, and the public halves of those that it had before.

use super::{Error, Result, folder};
use cresset_base::durable_file;
use ed25519_dalek::{SigningKey, VerifyingKey};
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The key's name in a data folder.
pub const NODE_KEY: &str = "node.key";
/// The name of the list of public keys: one in hex on each line, the oldest first.
pub const NODE_KEYS: &str = "node.keys";

fn path(data: &Path) -> PathBuf {
    data.join(NODE_KEY)
}

/// The node's key; `None` when it has signed nothing yet.
pub(super) fn find(data: &Path) -> Result<Option<SigningKey>> {
    let path = path(data);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        read => read.map_err(Error::io("read", &path))?,
    };
    let mut secret = [0; 32];
    hex::decode_to_slice(text.trim(), &mut secret).map_err(|_| Error::BadNodeKey { path })?;
    Ok(Some(SigningKey::from_bytes(&secret)))
}

/// The node's key, which is made if there is none. Nothing is signed with a key before it is
/// listed.
pub(super) fn find_or_make(data: &Path) -> Result<SigningKey> {
    let key = match find(data)? {
        Some(key) => key,
        None => make_one(data)?,
    };
    let (mut keys, own) = (read_list(data)?, key.verifying_key());
    if !keys.contains(&own) {
        keys.push(own);
        let lines: String = keys.iter().map(|key| hex::encode(key.as_bytes()) + "\n").collect();
        folder::write_whole(&data.join(NODE_KEYS), lines.as_bytes())?;
    }
    Ok(key)
}

/// The public keys that this node has signed with, the present one last.
pub(super) fn listed(data: &Path) -> Result<Vec<VerifyingKey>> {
    let mut keys = read_list(data)?;
    if let Some(own) = find(data)?.map(|key| key.verifying_key()) {
        keys.retain(|key| *key != own);
        keys.push(own);
    }
    Ok(keys)
}

fn read_list(data: &Path) -> Result<Vec<VerifyingKey>> {
    let path = data.join(NODE_KEYS);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(Error::io("read", &path))?,
    };
    let parse = |line: &str| {
        let mut bytes = [0; 32];
        hex::decode_to_slice(line, &mut bytes).ok()?;
        VerifyingKey::from_bytes(&bytes).ok()
    };
    text.lines().map(parse).collect::<Option<_>>().ok_or(Error::BadKeyList { path })
}

fn make_one(data: &Path) -> Result<SigningKey> {
    let path = path(data);
    match make(&path) {
        // Another process made one in the meantime.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        made => made.map_err(Error::io("create", &path))?,
    }
    find(data)?.ok_or(Error::BadNodeKey { path })
}

/// Writes a new key of 32 random bytes in hex. It gets its name when it is complete, and never
/// replaces another one.
fn make(path: &Path) -> io::Result<()> {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).map_err(io::Error::other)?;
    let unfinished = path.with_extension(format!("key.{}.new", std::process::id()));
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
    writeln!(file, "{}", hex::encode(secret))?;
    file.sync_all()?;
    let linked = fs::hard_link(&unfinished, path);
    fs::remove_file(&unfinished)?;
    linked?;
    durable_file::sync_name(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_is_made_once_and_is_its_owners_alone() {
        let data = tempfile::tempdir().unwrap();
        assert!(find(data.path()).unwrap().is_none());
        let made = find_or_make(data.path()).unwrap();
        let mode = fs::metadata(path(data.path())).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(find_or_make(data.path()).unwrap().to_bytes(), made.to_bytes());
        assert_eq!(make(&path(data.path())).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read_dir(data.path()).unwrap().count(), 2, "it, its list and nothing else");
        let other = tempfile::tempdir().unwrap();
        assert_ne!(find_or_make(other.path()).unwrap().to_bytes(), made.to_bytes());
        fs::write(path(data.path()), "short").unwrap();
        let error = find(data.path()).unwrap_err().to_string();
        assert!(error.contains("node.key"), "{error}");
    }
}

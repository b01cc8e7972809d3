//! The operator's Unix socket in the data folder, which only the node's own user may open.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;

/// Path of the one route.
pub const ROUTE: &str = "/command";

pub fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("operator.sock")
}

/// Binds the socket. The caller holds the folder's lock, so an existing socket belongs to a node
/// that has ended, and is replaced.
pub fn bind(data_dir: &Path) -> io::Result<UnixListener> {
    bind_at(&path(data_dir))
}

/// A socket that only the node's own user may open.
pub fn bind_at(path: &Path) -> io::Result<UnixListener> {
    // The socket is renamed into place once its mode is right, so that it accepts no connection
    // before.
    let unfinished = path.with_extension("sock.new");
    remove(&unfinished)?;
    let listener = UnixListener::bind(&unfinished)?;
    std::fs::set_permissions(&unfinished, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&unfinished, path)?;
    Ok(listener)
}

pub fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

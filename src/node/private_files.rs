//! Keeps the files of a data folder from other users of the machine. New ones are made private by
//! the process's file mode mask; those of earlier versions may still be open to all.

use cresset_commands::{ACTS, TOKENS};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The rights of the group and of others.
const OTHERS: u32 = 0o077;

/// The files with answers, names, keys or proofs that other users may read or write. Everything
/// else in the folder is public or the operator's own.
pub fn open_to_others(data_dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    collect(data_dir, &mut found);
    found.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let own = ["lock", TOKENS, ACTS].contains(&&*name);
        own || name.contains(".redb") || name.ends_with(".key")
    });
    collect_below(&data_dir.join("qualification"), &mut found);
    found
}

/// Takes the rights of others away from those files. Returns what the operator is told of it.
pub(super) fn make(data_dir: &Path) -> Option<String> {
    let open = open_to_others(data_dir);
    let failed = open.iter().find_map(|path| {
        let failed = make_private(path).err()?;
        Some(format!("{} can be read by other users of this machine: {failed}", path.display()))
    });
    let done = (!open.is_empty()).then(|| {
        let shown = data_dir.display();
        format!("other users could open {} files of {shown}: now its owner alone can", open.len())
    });
    failed.or(done)
}

fn make_private(path: &Path) -> std::io::Result<()> {
    let mode = fs::metadata(path)?.permissions().mode();
    fs::set_permissions(path, Permissions::from_mode(mode & !OTHERS))
}

/// Adds the files of a folder, without its folders and links.
fn collect(folder: &Path, found: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    found.extend(entries.filter_map(|entry| {
        let metadata = entry.metadata().ok().filter(fs::Metadata::is_file)?;
        (metadata.permissions().mode() & OTHERS != 0).then(|| entry.path())
    }));
}

fn collect_below(folder: &Path, found: &mut Vec<PathBuf>) {
    collect(folder, found);
    let folders = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = folders.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.for_each(|entry| collect_below(&entry.path(), found));
}

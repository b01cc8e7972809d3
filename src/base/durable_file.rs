//! Files whose content is replaced as a whole, and names that outlast a power loss.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Replaces the content of a file, or makes the file, with these rights or those of a new one. A
/// reader sees the old or the new content, never a part, also after a power loss.
pub fn replace(path: &Path, content: &[u8], rights: Option<Permissions>) -> io::Result<()> {
    let part = path.with_added_extension("part");
    let mut file = create(&part, rights.is_some())?;
    if let Some(rights) = rights {
        file.set_permissions(rights)?;
    }
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&part, path)?;
    sync_name(path)
}

/// Makes a file or empties it. Where other rights are to follow, a new file is the owner's alone
/// until then: a reader who had it open before would see what is written after.
fn create(path: &Path, owner_alone: bool) -> io::Result<File> {
    let mode = if owner_alone { 0o600 } else { 0o666 };
    OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(path)
}

/// Makes the name of a file or folder durable.
pub fn sync_name(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// The path, if it has one of these extensions and its folder exists.
pub fn file_of_kind(text: &str, kinds: &[&str]) -> Option<PathBuf> {
    let file = PathBuf::from(text);
    let known = file.extension().is_some_and(|kind| kinds.iter().any(|name| kind == *name));
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    (known && folder.is_none_or(Path::is_dir)).then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_gets_its_content_and_rights_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.key");
        fs::write(&path, "before").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        replace(&path, b"after", Some(Permissions::from_mode(0o600))).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!((fs::read_to_string(&path).unwrap(), mode & 0o777), ("after".into(), 0o600));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn nobody_else_can_open_a_file_before_it_has_its_rights() {
        let folder = tempfile::tempdir().unwrap();
        let file = create(&folder.path().join("a.key.part"), true).unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }
}

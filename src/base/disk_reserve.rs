//! Disk space that large files leave free, so that what must be durable can still be written.

use rustix::fs::{stat, statvfs};
use std::path::{Path, PathBuf};

/// The space that stays free on the disk of a folder.
#[derive(Clone, Debug, Default)]
pub struct DiskReserve {
    folder: PathBuf,
    bytes: u64,
}

/// There is too little space for a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{place} has {} MiB free, of which {} MiB stay free (requests.min_free_mib): {} MiB more are \
     too much. Free some space there: `cresset models list` shows what models take, `cresset \
     models remove NAME` frees it",
    free >> 20, reserved >> 20, wanted.div_ceil(1 << 20), place = place.display()
)]
pub struct NoSpace {
    place: PathBuf,
    free: u64,
    reserved: u64,
    wanted: u64,
}

impl DiskReserve {
    /// Keeps `bytes` free where `folder` is.
    pub fn new(folder: &Path, bytes: u64) -> Self {
        Self { folder: folder.to_owned(), bytes }
    }

    /// Whether `wanted` bytes more can be written at `place`, whose parent exists. A disk that is
    /// not the folder's may be filled. One that cannot be asked is not judged.
    pub fn check(&self, place: &Path, wanted: u64) -> Result<(), NoSpace> {
        let there = if place.is_dir() { place } else { place.parent().unwrap_or(place) };
        let device = |path: &Path| stat(path).map(|found| found.st_dev).ok();
        let reserved = if device(there) == device(&self.folder) { self.bytes } else { 0 };
        let Ok(found) = statvfs(there) else { return Ok(()) };
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        if reserved.saturating_add(wanted) <= free {
            return Ok(());
        }
        Err(NoSpace { place: there.to_owned(), free, reserved, wanted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserve_holds_on_its_own_disk_alone() {
        let data = tempfile::tempdir().unwrap();
        let file = data.path().join("new");
        let check = |folder: &Path, reserved: u64, wanted: u64| {
            DiskReserve::new(folder, reserved).check(&file, wanted)
        };
        assert_eq!(check(data.path(), 1 << 20, 1 << 20), Ok(()));
        std::fs::write(&file, "begun").unwrap();
        let why = check(data.path(), 1 << 60, 1).unwrap_err().to_string();
        assert!(why.contains("requests.min_free_mib") && why.contains("1 MiB more"), "{why}");
        assert!(why.starts_with(&format!("{} has", data.path().display())), "{why}");
        assert!(check(data.path(), 0, 1 << 60).is_err());
        assert_eq!(check(Path::new("/proc"), 1 << 60, 1), Ok(()));
        assert!(check(data.path(), u64::MAX, u64::MAX).is_err());
    }
}

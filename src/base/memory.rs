//! The memory of this machine, or of the container that the process runs in.

use std::path::Path;

/// A figure of this machine's memory, such as `MemTotal`, in bytes; `None` where the platform does
/// not say.
pub fn memory_bytes(figure: &str) -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let rest = info.lines().find_map(|line| line.strip_prefix(figure)?.strip_prefix(':'))?;
    let kibibytes: u64 = rest.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kibibytes * 1024)
}

/// The most memory that this process had at once so far, bytes.
pub fn peak_bytes() -> Option<u64> {
    own("VmHWM:")
}

/// The memory that this process has now, bytes.
pub fn resident_bytes() -> Option<u64> {
    own("VmRSS:")
}

/// A figure of this process' memory, bytes.
fn own(figure: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let rest = status.lines().find_map(|line| line.strip_prefix(figure))?;
    let kibibytes: u64 = rest.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kibibytes * 1024)
}

/// The memory that this process may use at most, bytes: the machine's, or the lower limit of its
/// control group.
pub fn usable_bytes() -> Option<u64> {
    let membership = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limit = group_limit(Path::new("/sys/fs/cgroup"), &membership);
    [memory_bytes("MemTotal"), limit].into_iter().flatten().min()
}

/// The lowest memory limit of the groups in `membership`, the text of `/proc/self/cgroup`, and of
/// the groups above them. Inside a container the path may be the host's, while the container's own
/// group is mounted as the root: that one is read in any case.
fn group_limit(root: &Path, membership: &str) -> Option<u64> {
    let limits = membership.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let controllers = parts.next().unwrap_or_default();
        let path = parts.next().unwrap_or_default().trim_start_matches('/');
        // A path that leaves the namespace cannot be followed.
        let path = if path.contains("..") { "" } else { path };
        let (base, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ => (root.join("memory"), "memory.limit_in_bytes"),
        };
        let is_memory = controllers.is_empty() || controllers.split(',').any(|one| one == "memory");
        let groups = Path::new(path).ancestors().map(|group| base.join(group).join(file));
        groups.filter(|_| is_memory).filter_map(|file| limit_in(&file)).collect::<Vec<_>>()
    });
    limits.min()
}

/// `None` where the file is missing or says `max`.
fn limit_in(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_of_the_groups_counts() {
        let check = |membership: &str, files: &[(&str, &str)], expect: Option<u64>| {
            let root = tempfile::tempdir().unwrap();
            for (name, text) in files {
                let file = root.path().join(name);
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(file, text).unwrap();
            }
            assert_eq!(group_limit(root.path(), membership), expect, "{membership} {files:?}");
        };
        check("0::/a/b\n", &[("a/b/memory.max", "700\n"), ("a/memory.max", "900\n")], Some(700));
        check("0::/a/b\n", &[("a/b/memory.max", "max\n"), ("a/memory.max", "900\n")], Some(900));
        check("0::/a/b\n", &[("a/b/memory.max", "max\n")], None);
        check("0::/\n", &[("memory.max", "5\n")], Some(5));
        check("0::/../../host/path\n", &[("memory.max", "5\n")], Some(5));
        let old = "4:cpu,cpuacct:/x\n3:memory:/docker/1\n";
        check(old, &[("memory/memory.limit_in_bytes", "800")], Some(800));
        let own = ("memory/docker/1/memory.limit_in_bytes", "600");
        check(old, &[("memory/memory.limit_in_bytes", "800"), own], Some(600));
        check("4:cpu:/x\n", &[("memory/x/memory.limit_in_bytes", "1")], None);
        check("", &[("memory.max", "5")], None);
    }
}

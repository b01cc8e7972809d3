//! The number of files that the process may have open, and how many of them connections may take.

use crate::config::HttpSettings;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Many systems let a process have 1 024 files open until it asks for more: fewer than the
/// connections a node may have.
pub(super) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If this is refused, fewer connections are accepted.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// The settings of the public and of the operator surface, with no more connections than there are
/// files for.
pub(super) fn limited(http: &HttpSettings) -> [HttpSettings; 2] {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    shared_out(http, usize::try_from(files).unwrap_or(usize::MAX))
}

/// The operator surface may use half of the reserve, which is at most half of all files.
fn shared_out(http: &HttpSettings, files: usize) -> [HttpSettings; 2] {
    let reserve = http.reserved_files.min(files / 2);
    [files - reserve, reserve / 2].map(|most| HttpSettings {
        max_connections: http.max_connections.min(most).max(1),
        ..http.clone()
    })
}

/// What an operator is told when connections are limited by the system.
pub(super) fn note(http: &HttpSettings) -> Option<String> {
    let [public, _] = limited(http);
    (public.max_connections < http.max_connections).then(|| {
        format!(
            "at most {} connections are accepted, not http.max_connections = {}: the system allows \
             the process too few open files; raise `ulimit -n`",
            public.max_connections, http.max_connections
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_files_for_everything_else() {
        let check = |max_connections: usize, files: usize, expect: [usize; 2]| {
            let http = HttpSettings { max_connections, ..HttpSettings::default() };
            let shared = shared_out(&http, files).map(|settings| settings.max_connections);
            assert_eq!(shared, expect, "{max_connections} of {files}");
        };
        check(4_096, 1 << 20, [4_096, 64]);
        check(4_096, 4_224, [4_096, 64]);
        check(4_096, 1_024, [896, 64]);
        check(4_096, 256, [128, 64]);
        check(4_096, 100, [50, 25]);
        check(10, 256, [10, 10]);
        check(4_096, 0, [1, 1]);
        check(4_096, usize::MAX, [4_096, 64]);
    }
}

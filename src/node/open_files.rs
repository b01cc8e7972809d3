//! The number of files that the process may have open, and how many of them connections may take.

use crate::config::Config;
use cresset_transport::HttpSettings;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Many systems let a process have 1 024 files open until it asks for more: fewer than the
/// connections a node may have.
pub(super) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If this is refused, fewer connections are accepted.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// The settings of the public surface, the operator surface and the gateway, with no more
/// connections than there are files for.
pub fn limited(config: &Config) -> [HttpSettings; 3] {
    let files = files();
    let files = files - 2 * peers(config, files);
    let shared = |gateway| shared_out(&config.http, gateway, files);
    let [mut public, operator, gateway] = shared(config.gateway.max_connections);
    // `quickstart` may open a gateway that the configuration does not have.
    if config.gateway.listen.is_none() {
        [public, ..] = shared(0);
    }
    [public, operator, gateway]
}

/// The settings of the listener of other nodes, which pass on heads with one header more than
/// clients may send.
pub(super) fn of_peers(config: &Config) -> HttpSettings {
    let most = peers(config, files());
    let http = &config.http;
    HttpSettings {
        max_connections: most,
        max_connections_per_ip: most,
        max_headers: http.max_headers + 1,
        max_header_bytes: http.max_header_bytes + 64,
        ..http.clone()
    }
}

/// Connections from other nodes, and as many to them; each takes at most an eighth of all files.
fn peers(config: &Config, files: usize) -> usize {
    let listens = config.cluster.listen.is_some();
    if listens { config.cluster.max_connections.min(files / 8).max(1) } else { 0 }
}

fn files() -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files).unwrap_or(usize::MAX)
}

/// The operator surface may use half of the reserve, which is at most half of all files; the
/// gateway's connections, of two files each, at most half of the rest.
fn shared_out(http: &HttpSettings, gateway: usize, files: usize) -> [HttpSettings; 3] {
    let reserve = http.reserved_files.min(files / 2);
    let gateway = gateway.min((files - reserve) / 4);
    let public = http.max_connections.min(files - reserve - 2 * gateway);
    [public, http.max_connections.min(reserve / 2), gateway]
        .map(|most| HttpSettings { max_connections: most.max(1), ..http.clone() })
}

/// What an operator is told when connections are limited by the system.
pub(super) fn note(config: &Config) -> Option<String> {
    let http = &config.http;
    let [public, ..] = limited(config);
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
    fn a_gateway_that_is_opened_later_has_its_connections() {
        let [public, _, gateway] = limited(&Config::default());
        assert!(gateway.max_connections > 1 && public.max_connections > gateway.max_connections);
    }

    #[test]
    fn connections_leave_files_for_everything_else() {
        let check = |max_connections: usize, gateway: usize, files: usize, expect: [usize; 3]| {
            let http = HttpSettings { max_connections, ..HttpSettings::default() };
            let shared = shared_out(&http, gateway, files).map(|settings| settings.max_connections);
            assert_eq!(shared, expect, "{max_connections} of {files}");
        };
        check(4_096, 0, 1 << 20, [4_096, 64, 1]);
        check(4_096, 256, 1 << 20, [4_096, 64, 256]);
        check(4_096, 0, 4_224, [4_096, 64, 1]);
        check(4_096, 256, 4_224, [3_584, 64, 256]);
        check(4_096, 0, 1_024, [896, 64, 1]);
        check(4_096, 256, 1_024, [448, 64, 224]);
        check(4_096, 0, 100, [50, 25, 1]);
        check(10, 0, 256, [10, 10, 1]);
        check(4_096, 256, 0, [1, 1, 1]);
        check(4_096, 0, usize::MAX, [4_096, 64, 1]);
    }
}

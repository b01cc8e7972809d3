//! A database of the tests' own: the machine's PostgreSQL in a folder, on a socket there, as a user
//! without rights.

use super::super::PostgresConfig;
use super::super::driver::Driver;
use super::super::session::{Connector, DatabaseSession, SessionKind};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tempfile::TempDir;

/// PostgreSQL refuses to run as root.
const NOBODY: u32 = 65_534;
/// The server's own port, which names its socket.
const PORT: u16 = 5432;
/// How long a node that is not heard of counts as alive in these tests.
const LEASE: Duration = Duration::from_millis(300);

/// Starts the server, says so, and stops it when this process has ended, however it did.
const SCRIPT: &str = r#"
"$1/initdb" -D "$2/data" -U cresset -A trust -N >"$2/log" 2>&1 &&
"$1/pg_ctl" -D "$2/data" -l "$2/log" -w -o "-c listen_addresses= -c fsync=on \
    -c unix_socket_directories=$2 -c max_connections=200 $3" start >/dev/null 2>&1 && echo ready
read -r _
"$1/pg_ctl" -D "$2/data" -m immediate stop >/dev/null 2>&1
rm -rf "$2"
"#;

pub struct Cluster {
    folder: PathBuf,
    port: u16,
    driver: Driver,
    /// What stops the server once its standard input is closed.
    guard: Child,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        self.guard.wait().unwrap();
    }
}

/// The cluster that the tests of a process share; `None` where PostgreSQL is not installed.
pub fn shared() -> Option<&'static Cluster> {
    static CLUSTER: OnceLock<Option<Cluster>> = OnceLock::new();
    CLUSTER.get_or_init(|| programs().map(|programs| Cluster::start(&programs))).as_ref()
}

/// The folder with PostgreSQL's programs. Where there is none, tests are skipped, unless
/// `CRESSET_REQUIRE_POSTGRES` is 1.
pub fn programs() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut folders: Vec<_> = versions.map(|version| version.path().join("bin")).collect();
    folders.sort();
    let path = std::env::var_os("PATH").unwrap_or_default();
    folders.extend(std::env::split_paths(&path));
    let found = folders.into_iter().find(|folder| folder.join("initdb").exists());
    if found.is_none() {
        let required = std::env::var("CRESSET_REQUIRE_POSTGRES").is_ok_and(|value| value == "1");
        let what = "PostgreSQL is not here: install Debian's package postgresql";
        assert!(!required, "{what}");
        eprintln!("skipped: {what} (CRESSET_REQUIRE_POSTGRES=1 makes this an error)");
    }
    found
}

impl Cluster {
    pub fn start(programs: &Path) -> Self {
        Self::start_with(programs, PORT, |_| String::new())
    }

    /// A cluster with another port and further options of the server, which may name files that
    /// `prepare` puts into its folder.
    pub fn start_with(programs: &Path, port: u16, prepare: impl FnOnce(&Path) -> String) -> Self {
        let folder = TempDir::new().unwrap().keep();
        let options = format!("-c port={port} {}", prepare(&folder));
        let mut server = Command::new("sh");
        server.args(["-c", SCRIPT, "sh"]).arg(programs).arg(&folder).arg(options);
        server.current_dir(&folder);
        server.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
        if rustix::process::geteuid().is_root() {
            let files = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path());
            for path in files.chain([folder.clone()]) {
                chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
            }
            server.uid(NOBODY).gid(NOBODY);
        }
        let mut server = server.spawn().unwrap();
        let mut ready = String::new();
        let said = BufReader::new(server.stdout.take().unwrap()).read_line(&mut ready);
        let log = || std::fs::read_to_string(folder.join("log")).unwrap_or_default();
        assert!(said.is_ok() && ready == "ready\n", "PostgreSQL does not start: {}", log());
        Self { folder, port, driver: Driver::start().unwrap(), guard: server }
    }

    /// Where its socket is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A place without a ledger: a schema of its own.
    pub fn place(&self) -> PostgresConfig {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let schema = format!("place{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let mut place = place_in(&self.folder, &format!("-csearch_path={schema}"));
        place.server.port(self.port);
        self.with_session(&place, async |session| {
            session.script(&format!("create schema {schema}")).await.unwrap();
        });
        place
    }

    /// A place with an empty ledger.
    pub fn ledger(&self) -> PostgresConfig {
        let place = self.place();
        super::super::init(&place).unwrap();
        place
    }

    /// Work in a session of its own, as a person would have with `psql`.
    pub fn with_session<T>(
        &self,
        place: &PostgresConfig,
        work: impl AsyncFnOnce(&DatabaseSession) -> T,
    ) -> T {
        let connector = Arc::new(Connector::new(place, self.driver.handle()));
        self.driver.wait(async {
            let session = connector.connect(SessionKind::Auditor).await.unwrap();
            work(&session).await
        })
    }
}

/// The place behind the socket in a folder, with these options of the session.
pub fn place_in(folder: &Path, options: &str) -> PostgresConfig {
    let mut server = Box::new(tokio_postgres::Config::new());
    server.host_path(folder).user("cresset").dbname("postgres").options(options);
    PostgresConfig { server, tls: None, connections: 4, standbys: 0, lease: LEASE, folder: None }
}

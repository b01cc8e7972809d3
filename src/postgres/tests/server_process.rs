//! A PostgreSQL server of the tests' own: the machine's programs on a folder, with a socket there,
//! as a user without rights.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// PostgreSQL refuses to run as root.
const NOBODY: u32 = 65_534;
const MAKE: &str = r#""$1/initdb" -D "$2/data" -U cresset -A trust -N >"$2/log" 2>&1 &&"#;
/// A standby of the server in the folder `$4`.
const COPY: &str = r#""$1/pg_basebackup" -D "$2/data" -R -h "$4" -U cresset >"$2/log" 2>&1 &&"#;
/// Starts the server, says so, and stops it when this process has ended, however it did.
const RUN: &str = r#"
"$1/pg_ctl" -D "$2/data" -l "$2/log" -w -o "-c listen_addresses= -c fsync=on \
    -c unix_socket_directories=$2 -c max_connections=200 $3" start >/dev/null 2>&1 && echo ready
read -r _
"$1/pg_ctl" -D "$2/data" -m immediate stop >/dev/null 2>&1
rm -rf "$2"
"#;

/// A server that runs until this is dropped.
pub struct ServerProcess {
    pub folder: PathBuf,
    /// What stops the server once its standard input is closed.
    guard: Child,
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        self.guard.wait().unwrap();
    }
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

impl ServerProcess {
    /// A server at this port, which names its socket, with further options, which may name files
    /// that `prepare` puts into its folder.
    pub fn start(programs: &Path, port: u16, prepare: impl FnOnce(&Path) -> String) -> Self {
        Self::run(programs, port, MAKE, Path::new(""), prepare)
    }

    /// A standby of the server in a folder, which has the default port.
    pub fn standby_of(folder: &Path, programs: &Path) -> Self {
        Self::run(programs, 5432, COPY, folder, |_| String::new())
    }

    fn run(
        programs: &Path,
        port: u16,
        make: &str,
        from: &Path,
        prepare: impl FnOnce(&Path) -> String,
    ) -> Self {
        let folder = TempDir::new().unwrap().keep();
        let options = format!("-c port={port} {}", prepare(&folder));
        let mut server = Command::new("sh");
        server.args(["-c", &[make, RUN].concat(), "sh"]).arg(programs).arg(&folder);
        server.arg(options).arg(from).current_dir(&folder);
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
        Self { folder, guard: server }
    }

    /// Runs one of the server's programs as its user.
    pub fn program(&self, programs: &Path, name: &str, arguments: &[&str]) {
        let mut program = Command::new(programs.join(name));
        program.args(arguments).current_dir(&self.folder).stdout(Stdio::null());
        if rustix::process::geteuid().is_root() {
            program.uid(NOBODY).gid(NOBODY);
        }
        assert!(program.status().unwrap().success(), "{name} {arguments:?}");
    }

    /// Sends a signal to all processes of the server.
    pub fn signal(&self, name: &str) {
        let file = std::fs::read_to_string(self.folder.join("data/postmaster.pid")).unwrap();
        let first = file.lines().next().unwrap().to_owned();
        let children = format!("/proc/{first}/task/{first}/children");
        let children = std::fs::read_to_string(children).unwrap();
        // All at once: a session that goes on after the others would end their nodes. A child may
        // have ended meanwhile.
        let all = [&*first].into_iter().chain(children.split_whitespace());
        let _ = Command::new("kill").arg(format!("-{name}")).args(all).status();
    }
}

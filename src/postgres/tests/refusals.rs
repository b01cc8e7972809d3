//! Databases that cannot be meant are refused in one sentence that names the setting, and no start
//! tries them again.

use super::cluster::{self, Cluster, place_in};
use super::server_process::ServerProcess;
use crate::session::{Ask, DatabaseSession};
use crate::{PostgresBackend, PostgresConfig};
use cresset_store::codec::encode;
use cresset_store::{DatabasePlace, StoreError};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

fn refused(place: &PostgresConfig) -> String {
    match PostgresBackend::open(place).err() {
        Some(StoreError::Unusable(why)) => why,
        other => panic!("a start would try again: {other:?}"),
    }
}

/// Users whose names begin with `locked` need a password.
const RULES: &str =
    "local all locked scram-sha-256\nlocal all barred reject\nlocal all all trust\n";

#[test]
fn users_passwords_and_databases_that_are_wrong_are_named() {
    let Some(programs) = cluster::programs() else { return };
    let cluster = Cluster::start_with(&programs, 5432, |folder| {
        let rules = folder.join("rules");
        std::fs::write(&rules, RULES).unwrap();
        format!("-c hba_file={}", rules.display())
    });
    let place = cluster.ledger();
    let locked = "create role locked login password 'open sesame'; create role barred login";
    cluster.with_session(&place, async |session| session.script(locked).await.unwrap());
    let as_user = |user: &str| {
        let mut place = place.clone();
        place.server.user(user);
        place
    };
    let (mut wrong, mut elsewhere) = (as_user("locked"), place.clone());
    wrong.server.password("wrong");
    elsewhere.server.dbname("another");
    let user = "check the user in ledger.url, ledger.password_file";
    for (place, part) in [
        (wrong, user),
        (as_user("locked"), "ledger.password_file"),
        (as_user("barred"), user),
        (as_user("nobody else"), user),
        (elsewhere, "the database's name in ledger.url"),
    ] {
        let why = refused(&place);
        assert!(why.contains(part) && !why.contains("sesame"), "{part}: {why}");
    }
}

#[test]
fn a_server_that_loses_what_it_acknowledged_is_refused() {
    let Some(programs) = cluster::programs() else { return };
    for setting in ["fsync", "full_page_writes"] {
        let options = format!("-c {setting}=off");
        let cluster = Cluster::start_with(&programs, 5432, |_| options);
        let why = refused(&cluster.place());
        assert!(why.contains(&format!("ledger.url has {setting} off")), "{why}");
    }
}

#[test]
fn a_standby_is_refused_where_no_primary_is_named() {
    let Some(programs) = cluster::programs() else { return };
    let primary = ServerProcess::start(&programs, 5432, |_| String::new());
    let standby = ServerProcess::standby_of(&primary.folder, &programs);
    let place = place_in(&standby.folder, "");
    let why = refused(&place);
    assert!(why.contains("it is a standby: name the primary in ledger.url"), "{why}");
    // Beside the primary it does no harm.
    let mut both = place.clone();
    both.server.host_path(&primary.folder);
    assert!(refused(&both).contains("cresset init --ledger"));
}

/// The tables with the mark that they had before schemas began at 1.
#[test]
fn a_ledger_of_an_older_format_is_refused_and_left_alone() {
    let Some(cluster) = cluster::shared() else { return };
    for schema in 1..=2_u32 {
        let place = cluster.ledger();
        let row = hex::encode(encode(b"identity", &schema));
        let age =
            format!("update meta set key = 'identity', row = '\\x{row}' where key = 'format'");
        cluster.with_session(&place, async |session| session.script(&age).await.unwrap());
        let before = cluster.with_session(&place, told);
        assert_eq!(
            refused(&place),
            "the ledger in the database has a format from before version 0.2.0 and is left as it is: the last commit that reads it is 0b3e359a"
        );
        assert!(place.init().unwrap_err().to_string().contains("left as it is"));
        assert_eq!(cluster.with_session(&place, told), before);
    }
}

/// The rows of `meta`, and the nodes.
async fn told(session: &DatabaseSession) -> String {
    let all = "select string_agg(key || encode(row, 'hex'), ' ' order by key) || \
        (select count(*) from nodes) from meta";
    session.ask(Ask::new(all)).await.unwrap().rows[0].get(0)
}

/// A pooler of transactions before a server, with two sessions there.
struct Pooler {
    folder: TempDir,
    process: Child,
}

impl Drop for Pooler {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

fn pooler() -> Option<PathBuf> {
    let found = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer"].map(PathBuf::from);
    let found = found.into_iter().find(|path| path.exists());
    if found.is_none() {
        eprintln!("skipped: there is no PgBouncer (Debian's package pgbouncer)");
    }
    found
}

impl Pooler {
    fn before(server: &Path, program: &Path) -> Self {
        let folder = TempDir::new().unwrap();
        let (dir, file) = (folder.path().display(), folder.path().join("pooler.ini"));
        let settings = format!(
            "[databases]\npostgres = host={} user=cresset pool_size=2\n[pgbouncer]\n\
             listen_addr =\nlisten_port = 5432\nunix_socket_dir = {dir}\nauth_type = any\n\
             pool_mode = transaction\nlogfile = {dir}/log\nignore_startup_parameters = options\n",
            server.display()
        );
        std::fs::write(&file, settings).unwrap();
        let mut process = Command::new(program);
        process.arg(&file).stdout(Stdio::null()).stderr(Stdio::null());
        if rustix::process::geteuid().is_root() {
            for path in [folder.path(), &file] {
                chown(path, Some(65_534), Some(65_534)).unwrap();
                std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
            }
            process.uid(65_534).gid(65_534);
        }
        let process = process.spawn().unwrap();
        while !folder.path().join(".s.PGSQL.5432").exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        Self { folder, process }
    }
}

#[test]
fn a_proxy_that_pools_transactions_is_named() {
    let Some(programs) = cluster::programs() else { return };
    let Some(program) = pooler() else { return };
    let cluster = Cluster::start(&programs);
    // The pooler takes no options, so the tables are where they are without a schema's name.
    place_in(cluster.folder(), "").init().unwrap();
    let pooler = Pooler::before(cluster.folder(), &program);
    let why = refused(&place_in(pooler.folder.path(), ""));
    assert!(why.contains("a proxy in between") && why.contains("ledger.url"), "{why}");
}

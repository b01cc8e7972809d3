//! A database of the tests' own, and places for ledgers in it.

use super::server_process::ServerProcess;
pub use super::server_process::programs;
use crate::PostgresConfig;
use crate::driver::Driver;
use crate::session::{Connector, DatabaseSession, SessionKind};
use cresset_store::{DatabasePlace, LedgerSettings, NodeFacts};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The server's own port, which names its socket.
const PORT: u16 = 5432;
/// How long a node that is not heard of counts as alive in these tests.
const LEASE: Duration = Duration::from_millis(300);

pub struct Cluster {
    server: ServerProcess,
    port: u16,
    driver: Driver,
}

/// The cluster that the tests of a process share; `None` where PostgreSQL is not installed.
pub fn shared() -> Option<&'static Cluster> {
    static CLUSTER: OnceLock<Option<Cluster>> = OnceLock::new();
    CLUSTER.get_or_init(|| programs().map(|programs| Cluster::start(&programs))).as_ref()
}

impl Cluster {
    pub fn start(programs: &Path) -> Self {
        Self::start_with(programs, PORT, |_| String::new())
    }

    /// A cluster with another port and further options of the server, which may name files that
    /// `prepare` puts into its folder.
    pub fn start_with(programs: &Path, port: u16, prepare: impl FnOnce(&Path) -> String) -> Self {
        let server = ServerProcess::start(programs, port, prepare);
        Self { server, port, driver: Driver::start().unwrap() }
    }

    /// Where its socket is.
    pub fn folder(&self) -> &Path {
        &self.server.folder
    }

    /// Sends a signal to all processes of the server.
    pub fn signal(&self, name: &str) {
        self.server.signal(name);
    }

    /// A place without a ledger: a schema of its own.
    pub fn place(&self) -> PostgresConfig {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let schema = format!("place{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let mut place = place_in(&self.server.folder, &format!("-csearch_path={schema}"));
        place.server.port(self.port);
        self.with_session(&place, async |session| {
            session.script(&format!("create schema {schema}")).await.unwrap();
        });
        place
    }

    /// A place with an empty ledger.
    pub fn ledger(&self) -> PostgresConfig {
        let place = self.place();
        place.init().unwrap();
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
    PostgresConfig {
        server,
        tls: None,
        settings: LedgerSettings::default(),
        lease: LEASE,
        folder: None,
        about: NodeFacts::default(),
    }
}

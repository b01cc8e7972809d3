//! What a ledger in a database is opened with, and how it is read from an address.

use cresset_store::{LedgerSettings, NodeFacts};
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};
use tokio_rustls::rustls::ClientConfig;

/// The place of a ledger in a database.
#[derive(Clone)]
pub struct PostgresConfig {
    /// Hosts, database, user and password.
    pub server: Box<Config>,
    /// How TLS is spoken to it; without it only unencrypted connections are made.
    pub tls: Option<Arc<ClientConfig>>,
    pub settings: LedgerSettings,
    /// How long a node that is not heard of counts as alive.
    pub lease: Duration,
    /// The data folder that a node locks while it uses the ledger.
    pub folder: Option<PathBuf>,
    /// What a node says of itself to the others.
    pub about: NodeFacts,
}

impl PostgresConfig {
    /// Reads `postgres://USER@HOST,HOST/DATABASE?OPTION=VALUE`. TLS is spoken unless all hosts are
    /// this machine or the address says `sslmode=disable`. The error names the setting.
    pub fn read(url: &str, password: Option<&str>, tls: Arc<ClientConfig>) -> Result<Self, String> {
        let wrong = |error: tokio_postgres::Error| {
            let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            format!("ledger.url is not an address like postgres://USER@HOST/DATABASE: {why}")
        };
        let mut server: Config = url.parse().map_err(wrong)?;
        if server.get_hosts().is_empty() {
            return Err("ledger.url names no host: write postgres://USER@HOST/DATABASE".into());
        }
        if server.get_password().is_some() {
            return Err("ledger.url holds a password: name a file in ledger.password_file".into());
        }
        password.map(|password| server.password(password));
        let mode = tls_mode(&server);
        server.ssl_mode(mode);
        Ok(Self {
            tls: (mode == SslMode::Require).then_some(tls),
            server: Box::new(server),
            settings: LedgerSettings::default(),
            lease: Duration::from_secs(10),
            folder: None,
            about: NodeFacts::default(),
        })
    }

    /// Standbys that a commit waits for.
    pub fn standbys(&self) -> u32 {
        self.settings.standbys.unwrap_or_default()
    }
}

impl std::fmt::Debug for PostgresConfig {
    /// The password is left out.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresConfig").field("server", &self.server).finish_non_exhaustive()
    }
}

fn tls_mode(server: &Config) -> SslMode {
    match server.get_ssl_mode() {
        SslMode::Prefer if server.get_hosts().iter().all(is_this_machine) => SslMode::Disable,
        SslMode::Disable => SslMode::Disable,
        _ => SslMode::Require,
    }
}

fn is_this_machine(host: &Host) -> bool {
    match host {
        Host::Unix(_) => true,
        Host::Tcp(name) => {
            let address: Option<std::net::IpAddr> = name.trim_matches(['[', ']']).parse().ok();
            name == "localhost" || address.is_some_and(|at| at.to_canonical().is_loopback())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str) -> Result<PostgresConfig, String> {
        PostgresConfig::read(url, Some("opensesame"), Arc::new(cresset_tls::client(None).unwrap()))
    }

    #[test]
    fn other_machines_are_spoken_to_with_tls() {
        for (url, secured) in [
            ("postgres://u@db1,db2/d", true),
            ("postgres://u@db1,localhost/d", true),
            ("postgres://u@db1/d?sslmode=prefer", true),
            ("postgres://u@db1/d?sslmode=disable", false),
            ("postgres://u@localhost/d", false),
            ("postgres://u@127.0.0.1:5433/d", false),
            ("postgres://u@localhost/d?sslmode=require", true),
            ("postgres:///d?host=/run/postgresql", false),
        ] {
            assert_eq!(read(url).unwrap().tls.is_some(), secured, "{url}");
        }
    }

    #[test]
    fn wrong_addresses_are_refused_and_passwords_not_shown() {
        for (url, part) in [
            ("postgres://u@db1:many/d", "ledger.url is not an address"),
            ("postgres://u@db1/d?sslmode=maybe", "ledger.url is not an address"),
            ("postgres://u@db1/d?colour=red", "colour"),
            ("postgres:///d", "names no host"),
            ("postgres://u@db1/d?p%61ssword=x", "holds a password"),
        ] {
            let error = read(url).unwrap_err();
            assert!(error.contains(part), "{url}: {error}");
        }
        assert!(!format!("{:?}", read("postgres://u@db1/d").unwrap()).contains("opensesame"));
    }
}

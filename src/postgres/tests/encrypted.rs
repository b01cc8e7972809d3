//! Connections with TLS, over a port of this machine.

use super::cluster::{self, Cluster};
use crate::{PostgresBackend, PostgresConfig};
use cresset_store::StoreError;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio_postgres::config::SslMode;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/it/tls").join(name)
}

#[test]
fn certificates_are_verified() {
    let Some(programs) = cluster::programs() else { return };
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let cluster = Cluster::start_with(&programs, port, |folder| {
        let [certificate, key] = ["first.pem", "first.key"].map(|name| {
            let to = folder.join(name);
            std::fs::copy(file(name), &to).unwrap();
            std::fs::set_permissions(&to, PermissionsExt::from_mode(0o600)).unwrap();
            to.display().to_string()
        });
        format!(
            "-c listen_addresses=127.0.0.1 -c ssl=on -c ssl_cert_file={certificate} \
             -c ssl_key_file={key}"
        )
    });
    let options = cluster.ledger().server.get_options().unwrap().to_owned();
    let mut server = Box::new(tokio_postgres::Config::new());
    server.host("localhost").port(port).user("cresset").dbname("postgres").options(options);
    server.ssl_mode(SslMode::Require);
    let client = |authority: Option<&Path>| Arc::new(cresset_tls::client(authority).unwrap());
    let place = |tls| PostgresConfig { server: server.clone(), tls, ..cluster.place() };
    let known = client(Some(&file("authority.pem")));
    PostgresBackend::open(&place(Some(known))).unwrap();
    let refused = PostgresBackend::open(&place(Some(client(None)))).err();
    let Some(StoreError::Unusable(why)) = &refused else { panic!("{refused:?}") };
    assert!(why.contains("tls.trusted"), "{why}");
    let refused = PostgresBackend::open(&place(None)).err();
    assert!(matches!(refused, Some(StoreError::Unavailable(_))), "{refused:?}");
}

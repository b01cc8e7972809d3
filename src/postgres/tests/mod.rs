//! Checks what the store promises over a real database. Without PostgreSQL on the machine these
//! tests are skipped; see `cluster`.

mod bench;
mod cluster;
mod encrypted;
mod faults;
mod kill;
mod lanes;
mod model;
mod moving;
mod node;
mod nodes;
mod outages;
mod proxy;
mod refusals;
mod server_process;

use super::PostgresBackend;
use cresset_store::testing::*;

/// Every promise of a backend, each over a ledger of its own.
#[test]
fn the_database_backend_keeps_its_promises() {
    let Some(cluster) = cluster::shared() else { return };
    contract::keeps_all(|| {
        let place = cluster.ledger();
        move || PostgresBackend::open(&place).unwrap()
    });
}

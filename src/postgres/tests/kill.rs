//! Kills a process under load again and again on one ledger: no acknowledged command is lost, and
//! every open reservation ends once.

use super::cluster;
use crate::PostgresConfig;
use cresset_base::SystemClock;
use cresset_ledger::AttemptState;
use cresset_store::testing::*;
use cresset_store::{Limits, Store, StoreConfig};
use std::path::PathBuf;
use std::sync::Arc;

/// The folder of the socket and the schema of the ledger, for the process that is killed.
const PLACE: &str = "CRESSET_TEST_LEDGER";

fn open(place: &PostgresConfig) -> Store {
    let config = StoreConfig::Database(Arc::new(place.clone()));
    Store::open(&config, Arc::new(SystemClock), Limits::default()).unwrap()
}

/// Not a test of its own: the one below starts it with a ledger, and kills it.
#[test]
#[ignore = "only does something with a ledger"]
fn load_until_killed() {
    let Ok(named) = std::env::var(PLACE) else { return };
    let (folder, options) = named.split_once(' ').unwrap();
    load::without_end(&open(&cluster::place_in(&PathBuf::from(folder), options)));
}

fn kill_often(rounds: usize) {
    let Some(cluster) = cluster::shared() else { return };
    let place = cluster.ledger();
    let store = open(&place);
    for command in opening(Microcredits::MAX.get()) {
        store.submit_blocking(command).unwrap();
    }
    drop(store);
    let options = place.server.get_options().unwrap();
    let named = format!("{} {options}", cluster.folder().display());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for round in 0..rounds {
        let mut child = load::process("tests::kill::load_until_killed");
        let known = load::kill_after(child.env(PLACE, &named), 1 + round * 13 % 60);
        assert!(!known.is_empty(), "round {round}: the load did nothing");
        let store = open(&place);
        assert_eq!(store.audit().unwrap().violations, Vec::<String>::new());
        runtime.block_on(async {
            let read = store.read().await.unwrap();
            for request in known {
                let record = read.request(&key(request)).await.unwrap();
                let record = record.expect("an acknowledged request");
                assert_eq!(record.latest().state, AttemptState::Completed);
                assert_eq!(u128::from(record.latest().charged.total().get()), request % 10);
                let answer = store.body(&key(request)).await.unwrap();
                assert_eq!(answer, Some(load::answer_to(request)), "round {round}");
            }
            assert_eq!(read.live_requests().await.unwrap(), [], "round {round}");
            let balances = read.balances(AccountId(id(1))).await.unwrap();
            assert_eq!(balances.premium.reserved.get(), 0, "round {round}");
        });
    }
}

#[test]
fn a_killed_node_loses_nothing_acknowledged() {
    kill_often(3);
}

#[test]
#[ignore = "minutes: many more kills"]
fn two_hundred_killed_nodes_lose_nothing() {
    kill_often(200);
}

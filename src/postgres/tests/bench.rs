//! Measures pairs of admission and settlement a second under load. It prints figures and asserts
//! nothing about them: `.ci/long database`.

use super::cluster;
use cresset_base::SystemClock;
use cresset_store::testing::*;
use cresset_store::{Limits, Store, StoreConfig};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use uuid::Uuid;

const SPAN: Duration = Duration::from_secs(5);

#[test]
#[ignore = "a measurement"]
fn pairs_a_second_in_a_database() {
    let Some(cluster) = cluster::shared() else { return };
    let config = StoreConfig::Database(Arc::new(cluster.ledger()));
    let store = Store::open(&config, Arc::new(SystemClock), Limits::default()).unwrap();
    for command in opening(Microcredits::MAX.get()) {
        store.submit_blocking(command).unwrap();
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for clients in [1, 64, 256] {
        let pairs = Arc::new(AtomicU64::new(0));
        let began = Instant::now();
        runtime.block_on(async {
            let mut all = tokio::task::JoinSet::new();
            for _ in 0..clients {
                let (store, pairs) = (store.clone(), Arc::clone(&pairs));
                all.spawn(async move {
                    while began.elapsed() < SPAN {
                        let request = Uuid::now_v7().as_u128();
                        let admit = admit(request, request, store.boot(), 10);
                        store.submit(admit).await.unwrap();
                        store.submit(settle(request, request, 1)).await.unwrap();
                        pairs.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            all.join_all().await;
        });
        let per_second = pairs.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64();
        println!("hot account, {clients} clients: {per_second:.0} pairs a second");
    }
    look_ups(&runtime, &store);
    assert!(store.audit().unwrap().ok);
}

fn look_ups(runtime: &tokio::runtime::Runtime, store: &Store) {
    let (found, began) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let mut digest = [0; 32];
    digest[15] = 1;
    runtime.block_on(async {
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..256 {
            let (store, found) = (store.clone(), Arc::clone(&found));
            all.spawn(async move {
                while began.elapsed() < SPAN {
                    assert!(store.credential_and_account(&digest).await.unwrap().is_some());
                    found.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        all.join_all().await;
    });
    let per_second = found.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64();
    println!("look-ups of credentials, 256 clients: {per_second:.0} a second");
}

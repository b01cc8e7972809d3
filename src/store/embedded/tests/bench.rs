//! Measures the cost of the writer and of the audit by themselves. It prints times and asserts
//! nothing about them: `cargo test --release --lib store::embedded::tests::bench -- --ignored
//! --nocapture`. Pairs a second under load: `cresset bench --ledger`.

use super::*;
use crate::store::limits::Limits;
use std::time::{Duration, Instant};

/// Measures the writer's own time for a pair, on a disk that costs nothing.
#[test]
#[ignore = "a measurement"]
fn writer_alone() {
    const BATCHES: u128 = 20;
    const WIDE: u128 = 256;
    let mut best = Duration::MAX;
    for _ in 0..10 {
        let (_, _, mut bench) = super::faults::opened(Microcredits::MAX.get());
        let boot = bench.shared.boot;
        let began = Instant::now();
        for batch in 0..BATCHES {
            // Request ids are spread as random ones would be.
            let requests = || {
                (0..WIDE).map(move |number| {
                    (batch * WIDE + number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
                })
            };
            bench.detach(requests().map(|request| admit(request, request, boot, 10)).collect());
            bench.detach(requests().map(|request| settle(request, request, 1)).collect());
        }
        best = best.min(began.elapsed());
        assert_eq!(u128::from(bench.premium().debited.get()), BATCHES * WIDE);
    }
    println!("{:.1} us a pair", best.as_secs_f64() * 1e6 / (BATCHES * WIDE) as f64);
}

/// Measures the cost of auditing a million entries: time, and memory beyond the page caches.
#[test]
#[ignore = "a measurement"]
fn audit_of_a_million_entries() {
    let fixture = Fixture::new(Microcredits::MAX.get());
    let store = fixture.open();
    let boot = store.boot();
    for round in 0..4 {
        std::thread::scope(|scope| {
            for client in 0..256 {
                let store = &store;
                scope.spawn(move || {
                    for number in 0..490 {
                        let request = ((round * 256 + client) * 490 + number + 1_u128)
                            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
                        store.submit_blocking(admit(request, request, boot, 10)).unwrap();
                        store.submit_blocking(settle(request, request, 1)).unwrap();
                    }
                });
            }
        });
        let began = Instant::now();
        let report = store.audit().unwrap();
        assert!(report.ok);
        println!(
            "{} entries: {:.1} s, {} KiB at most",
            report.entries,
            began.elapsed().as_secs_f64(),
            most_memory()
        );
    }
    drop(store);
    for (name, open) in
        [("node", Store::open as fn(&_, _, _) -> _), ("command", Store::open_briefly)]
    {
        let began = Instant::now();
        drop(open(&fixture.config(), Arc::new(fixture.clock.clone()), Limits::default()).unwrap());
        println!("opening and closing for a {name}: {:.1} s", began.elapsed().as_secs_f64());
    }
}

/// Returns the process's own high-water mark.
fn most_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

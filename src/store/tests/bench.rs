//! How many requests a second the ledger can admit and settle. Prints, asserts nothing about time:
//! `cargo test --release --lib store::tests::bench -- --ignored --nocapture`.

use super::*;
use std::time::{Duration, Instant};

const SPAN: Duration = Duration::from_secs(3);

/// Admits and settles in turn until the span is over; the number of pairs.
fn client(store: &Store, number: u128, until: Instant) -> u64 {
    let mut pairs = 0;
    while Instant::now() < until {
        let request = (number << 64) + u128::from(pairs) + 1;
        let admitted = store.submit_blocking(admit(request, request, store.boot(), 10));
        assert!(is_admitted(&admitted), "{admitted:?}");
        store.submit_blocking(settle(request, request, 1)).unwrap();
        pairs += 1;
    }
    pairs
}

#[test]
#[ignore = "a measurement"]
fn admit_and_settle() {
    let fixture = Fixture::new(Units::MAX.get());
    for clients in [1, 8, 64, 256] {
        let store = fixture.open();
        let begin = Instant::now();
        let until = begin + SPAN;
        let pairs: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (1..=clients)
                .map(|number| {
                    let number = number + (clients << 32);
                    let store = &store;
                    scope.spawn(move || client(store, number, until))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        let seconds = begin.elapsed().as_secs_f64();
        println!("{clients:>4} clients: {:>7.0} pairs/s", pairs as f64 / seconds);
        assert_sound(&store);
    }
}

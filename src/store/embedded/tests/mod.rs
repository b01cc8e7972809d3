//! Checks what the store promises on real files and on disks that fail.

mod bench;
mod disk;
mod faults;
mod fuzz;
mod kill;
mod layout;
mod lifecycle;
mod media;
mod model;
mod refusals;
mod restore;
mod schema;
mod sealed;
mod segments;
mod starts;
mod time;

use super::disk::File;
use super::{EmbeddedBackend, EmbeddedConfig};
use crate::testing::*;
use crate::{BackupScope, Limits, RestoreScope, Snapshot, Store, StoreConfig, StoreError};
use cresset_base::{AccountId, Clock, UnixMillis};
use cresset_ledger::{JournalEntry, RequestRecord};
use futures_util::FutureExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tempfile::TempDir;
use uuid::Uuid;

/// The answer of a read; the embedded backend has it at once.
trait Now: Future + Sized {
    fn now(self) -> Self::Output {
        self.now_or_never().expect("an embedded read is ready")
    }
}

impl<F: Future> Now for F {}

/// The account's requests that the ledger still knows, by their first reservations.
fn requests_of(read: &dyn Snapshot, account: AccountId) -> Vec<RequestRecord> {
    let entries = read.entries(account, 0, usize::MAX).now().unwrap();
    let first = |(key, attempt)| {
        let found = read.request(&key).now().unwrap();
        found.filter(|record| record.attempts[0].id == attempt)
    };
    entries.iter().filter_map(JournalEntry::reservation).filter_map(first).collect()
}

/// A clock that shows the time it was set to.
#[derive(Clone, Default)]
struct TestClock(Arc<AtomicU64>);

impl TestClock {
    fn at(now: u64) -> Self {
        Self(Arc::new(AtomicU64::new(now)))
    }

    fn set(&self, now: u64) {
        self.0.store(now, Ordering::Relaxed);
    }
}

impl Clock for TestClock {
    fn now(&self) -> UnixMillis {
        UnixMillis(self.0.load(Ordering::Relaxed))
    }
}

/// A folder with a ledger whose account 1 has one key and a premium balance.
struct Fixture {
    dir: TempDir,
    clock: TestClock,
}

impl Fixture {
    fn new(balance: u64) -> Self {
        let fixture = Self { dir: tempfile::tempdir().unwrap(), clock: TestClock::at(1_000_000) };
        Store::init(&fixture.config()).unwrap();
        let store = fixture.open();
        for command in opening(balance) {
            store.submit_blocking(command).unwrap();
        }
        fixture
    }

    fn files(&self) -> EmbeddedConfig {
        EmbeddedConfig::new(self.dir.path())
    }

    fn config(&self) -> StoreConfig {
        StoreConfig::Embedded(self.files())
    }

    fn open(&self) -> Store {
        self.try_open().unwrap()
    }

    fn try_open(&self) -> Result<Store, StoreError> {
        Store::open(&self.config(), Arc::new(self.clock.clone()), Limits::default())
    }
}

/// A copy of the files as a process killed now would leave them.
fn image(of: &Fixture) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    for file in File::ALL {
        std::fs::copy(of.dir.path().join(file.name()), dir.path().join(file.name())).unwrap();
    }
    let clock = of.clock.clone();
    Fixture { dir, clock }
}

/// Stores an answer until the time 2 000 000 whose settlement never comes.
fn keep_answer(store: &Store, request: u128, answer: &bytes::Bytes) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let kept = store.put_body(key(request), answer.clone(), UnixMillis(2_000_000));
    runtime.block_on(kept).unwrap();
}

/// Premium units of account 1: debited, reserved.
fn spent(store: &Store) -> (u64, u64) {
    let balances = store.read().now().unwrap().balances(AccountId(id(1))).now().unwrap();
    let premium = balances.premium;
    (premium.debited.get(), premium.reserved.get())
}

fn assert_sound(store: &Store) {
    assert_eq!(store.audit().unwrap().violations, Vec::<String>::new());
    assert!(store.healthy());
}

fn refusal(outcome: Result<Outcome, StoreError>) -> Refusal {
    match outcome {
        Err(StoreError::Refused(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

fn unusable<T>(result: Result<T, StoreError>) -> String {
    match result {
        Err(StoreError::Unusable(why)) => why,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("it was used"),
    }
}

/// Every promise of a backend, over files in a folder of its own.
#[test]
fn the_embedded_backend_keeps_its_promises() {
    contract::keeps_all(|| {
        let dir = tempfile::tempdir().unwrap();
        let config = EmbeddedConfig::new(dir.path());
        crate::embedded::init(&config).unwrap();
        move || {
            let _kept = &dir;
            EmbeddedBackend::open_on(super::lock(&config).unwrap()).unwrap()
        }
    });
}

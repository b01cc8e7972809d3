//! Creating, opening and using ledgers on real files.

use super::super::disk;
use super::*;
use crate::embedded::tables::{self, OrFault};
use crate::limits::Limits;
use crate::{AuditPolicy, OpenProgress};
use cresset_ledger::{AttemptState, RequestRecord};
use std::fs;
use std::path::Path;

#[test]
fn acknowledged_commands_are_there_after_a_restart() {
    let fixture = Fixture::new(100);
    let store = fixture.open();
    let boot = store.boot();
    assert!(is_admitted(&store.submit_blocking(admit(1, 1, boot, 40))));
    store.submit_blocking(start(1, 1)).unwrap();
    store.submit_blocking(settle(1, 1, 25)).unwrap();
    let record = store.read().now().unwrap().request(&key(1)).now().unwrap();
    drop(store);
    let store = fixture.open();
    assert_ne!(store.boot(), boot);
    assert_eq!(store.read().now().unwrap().request(&key(1)).now().unwrap(), record);
    assert_eq!(spent(&store), (25, 0));
    assert_sound(&store);
}

#[test]
fn a_crash_fails_what_was_open_and_charges_nothing() {
    let fixture = Fixture::new(100);
    let store = fixture.open();
    let boot = store.boot();
    for request in 1..=3 {
        assert!(is_admitted(&store.submit_blocking(admit(request, request, boot, 20))));
    }
    store.submit_blocking(start(1, 1)).unwrap();
    store.submit_blocking(settle(2, 2, 5)).unwrap();
    let crashed = image(&fixture);
    let store = crashed.open();
    let read = store.read().now().unwrap();
    let check = |request, state, failure| {
        let record = read.request(&key(request)).now().unwrap().unwrap();
        let latest = record.latest();
        assert_eq!((latest.state, latest.failure), (state, failure), "{request}");
    };
    let restarted = Some(FailureCode::NodeRestarted);
    check(1, AttemptState::Failed, restarted);
    check(2, AttemptState::Completed, None);
    check(3, AttemptState::Failed, restarted);
    assert_eq!(spent(&store), (5, 0));
    assert_sound(&store);
    assert!(is_admitted(&store.submit_blocking(admit(3, 4, store.boot(), 20))));
}

#[test]
fn reads_show_what_is_live_and_whose() {
    let fixture = Fixture::new(100);
    let store = fixture.open();
    let boot = store.boot();
    for (request, attempt) in [(1, 1), (2, 2)] {
        store.submit_blocking(admit(request, attempt, boot, 10)).unwrap();
    }
    store.submit_blocking(settle(1, 1, 1)).unwrap();
    let read = store.read().now().unwrap();
    let live = read.live_requests().now().unwrap();
    assert_eq!(live.iter().map(|record| record.key).collect::<Vec<_>>(), [key(2)]);
    let live_of = |credential| -> Vec<_> {
        let own =
            |record: &&RequestRecord| record.latest().credential == CredentialId(id(credential));
        live.iter().filter(own).cloned().collect()
    };
    assert_eq!(live_of(1), live);
    assert_eq!(live_of(2), []);
    let account = AccountId(id(1));
    assert_eq!(requests_of(&*read, account).len(), 2);
    assert_eq!(read.requests_by_id(account, RequestId(id(2))).now().unwrap(), live);
    assert_eq!(requests_of(&*read, AccountId(id(2))), []);
    let kinds: Vec<u64> = read
        .entries(account, 0, usize::MAX)
        .now()
        .unwrap()
        .iter()
        .map(|entry| entry.sequence)
        .collect();
    assert_eq!(kinds, [1, 2, 3, 4]);
    assert_eq!(read.accounts(None, 9).now().unwrap().len(), 1);
    assert_eq!(read.accounts(Some(account), 9).now().unwrap(), []);
    assert_eq!(read.credentials(None, 9).now().unwrap().len(), 1);
    assert_eq!(read.applications(None, 9).now().unwrap(), []);
    let mut digest = [0; 32];
    digest[15] = 1;
    assert!(store.credential_and_account(&digest).now().unwrap().is_some());
    assert!(store.credential_and_account(&[9; 32]).now().unwrap().is_none());
}

#[test]
fn a_balance_that_fits_k_admits_k() {
    let fixture = Fixture::new(70);
    let store = fixture.open();
    let boot = store.boot();
    let admitted: usize = std::thread::scope(|scope| {
        let racers: Vec<_> = (1..=64)
            .map(|request| {
                let store = &store;
                scope.spawn(move || store.submit_blocking(admit(request, request, boot, 10)))
            })
            .collect();
        let outcomes = racers.into_iter().map(|racer| racer.join().unwrap());
        outcomes.filter(is_admitted).count()
    });
    assert_eq!(admitted, 7);
    assert_eq!(spent(&store), (0, 70));
    assert_sound(&store);
}

#[test]
fn one_id_sent_64_times_runs_once() {
    let fixture = Fixture::new(1_000);
    let store = fixture.open();
    let boot = store.boot();
    let admitted: usize = std::thread::scope(|scope| {
        let racers: Vec<_> = (1..=64)
            .map(|attempt| {
                let store = &store;
                scope.spawn(move || store.submit_blocking(admit(1, attempt, boot, 10)))
            })
            .collect();
        let outcomes = racers.into_iter().map(|racer| racer.join().unwrap());
        outcomes.filter(is_admitted).count()
    });
    assert_eq!(admitted, 1);
    assert_eq!(spent(&store), (0, 10));
    assert_sound(&store);
}

/// An admission whose caller goes away at any moment leaves no reservation.
#[tokio::test]
async fn an_admission_without_a_waiting_caller_is_released() {
    let fixture = tokio::task::spawn_blocking(|| Fixture::new(10_000)).await.unwrap();
    let store = fixture.open();
    let boot = store.boot();
    for request in 1..=50 {
        let mut waiting = Box::pin(store.submit(admit(request, request, boot, 10)));
        let polled = futures_util::poll!(waiting.as_mut());
        assert!(polled.is_pending());
        for _ in 0..request {
            tokio::task::yield_now().await;
        }
        drop(waiting);
    }
    // Everything sent before this is done when it is answered; the releases of the last admissions
    // come before the next one.
    for request in 1_000..1_002 {
        let outcome = store.submit(Command::RequestCancel { key: key(request) }).await;
        assert_eq!(refusal(outcome), Refusal::RequestNotFound);
        store.submit(admit(5_000, 5_000, boot, 1)).await.unwrap();
    }
    store.submit(release(5_000, 5_000)).await.unwrap();
    assert_eq!(spent(&store), (0, 0));
    assert_sound(&store);
}

#[test]
fn a_detached_command_is_applied_before_later_ones() {
    let fixture = Fixture::new(100);
    let store = fixture.open();
    let boot = store.boot();
    store.submit_blocking(admit(1, 1, boot, 100)).unwrap();
    store.submit_detached(start(1, 1));
    store.submit_detached(settle(1, 1, 30));
    assert!(is_admitted(&store.submit_blocking(admit(2, 2, boot, 70))));
    assert_eq!(spent(&store), (30, 70));
}

#[test]
fn dropping_the_store_writes_what_is_queued() {
    let fixture = Fixture::new(100);
    let store = fixture.open();
    store.submit_blocking(admit(1, 1, store.boot(), 50)).unwrap();
    store.submit_detached(settle(1, 1, 20));
    drop(store);
    assert_eq!(spent(&fixture.open()), (20, 0));
}

#[test]
fn a_backup_leaves_the_reserve_of_the_disk_free() {
    let fixture = Fixture::new(100);
    let mut limits = Limits::default();
    limits.requests.min_free_mib = 1 << 40;
    let store = Store::open(&fixture.config(), Arc::new(fixture.clock.clone()), limits).unwrap();
    let to = fixture.dir.path().join("backup");
    let why = store.backup(&BackupScope::Ledger, &to).unwrap_err().to_string();
    assert!(why.contains("requests.min_free_mib") && !to.exists(), "{why}");
}

#[test]
fn low_disk_space_is_no_reason_to_keep_a_reservation() {
    let disk = media::SimulatedDisk::formatted();
    let store = disk.store(100);
    assert_eq!(store.admission_block(), None);
    disk.set_free(0);
    assert!(store.admission_block().unwrap().contains("min_free_mib"));
    // No admission has measured the free space yet, so this one does.
    let outcome = store.submit_blocking(admit(1, 1, store.boot(), 10));
    assert!(matches!(outcome, Err(StoreError::Unavailable(_))), "{outcome:?}");
    assert_eq!(refusal(store.submit_blocking(settle(1, 1, 1))), Refusal::RequestNotFound);
    assert!(store.healthy());
}

#[test]
fn two_processes_cannot_share_a_ledger() {
    let fixture = Fixture::new(1);
    let _store = fixture.open();
    assert!(matches!(fixture.try_open(), Err(StoreError::InUse(_))));
    let restored = Store::restore(&fixture.config(), Path::new("none"), RestoreScope::Ledger);
    assert!(matches!(restored, Err(StoreError::InUse(_))));
}

#[test]
fn a_ledger_is_never_created_over_anything() {
    let fixture = Fixture::new(50);
    let before = fs::read(fixture.dir.path().join("ledger.redb")).unwrap();
    assert!(unusable(Store::init(&fixture.config())).contains("left as it is"));
    assert_eq!(fs::read(fixture.dir.path().join("ledger.redb")).unwrap(), before);
    assert_eq!(spent(&fixture.open()), (0, 0));
    let missing = fixture.dir.path().join("missing");
    unusable(Store::init(&StoreConfig::folder(&missing)));
    assert!(!missing.exists());
}

#[test]
fn a_changed_balance_is_not_served() {
    let fixture = Fixture::new(50);
    let path = fixture.dir.path().join("ledger.redb");
    let database = disk::open_existing(&path).unwrap();
    let rich = cresset_ledger::Balances::default();
    tables::write(&database, |txn| {
        let mut balances = txn.open_table(tables::BALANCES).or_fault()?;
        tables::put(&mut balances, id(1).as_bytes(), &rich)
    })
    .unwrap();
    drop(database);
    assert!(unusable(fixture.try_open()).contains("other balances than its journal"));
}

#[test]
fn a_damaged_row_stops_admissions_but_not_its_neighbours() {
    let fixture = Fixture::new(50);
    let config = fixture.files();
    let backend = Arc::new(EmbeddedBackend::open_on(super::super::lock(&config).unwrap()).unwrap());
    let clock = Arc::new(fixture.clock.clone());
    let store = Store::start(
        &backend,
        clock,
        Limits::default(),
        AuditPolicy::Always,
        &OpenProgress::default(),
    )
    .unwrap();
    store.submit_blocking(admit(1, 1, store.boot(), 10)).unwrap();
    store.submit_blocking(admit(2, 2, store.boot(), 10)).unwrap();
    let raw = tables::request_key(&key(1));
    let spoiled = backend.with_files(|files| {
        tables::write(&files.ledger, |txn| {
            let mut requests = txn.open_table(tables::REQUESTS).or_fault()?;
            requests.insert(raw.as_slice(), b"junk".as_slice()).or_fault()?;
            Ok(())
        })
    });
    spoiled.unwrap();
    store.submit_detached(settle(1, 1, 5));
    assert!(matches!(store.submit_blocking(settle(2, 2, 5)), Ok(Outcome::Settled { .. })));
    assert!(!store.healthy());
    let outcome = store.submit_blocking(admit(3, 3, store.boot(), 1));
    assert!(matches!(outcome, Err(StoreError::Unavailable(_))), "{outcome:?}");
    assert!(matches!(
        store.credential_and_account(&[0; 32]).now(),
        Err(StoreError::Unavailable(_))
    ));
    assert!(store.stats().now().violations > 0);
    assert!(!store.audit().unwrap().ok);
}

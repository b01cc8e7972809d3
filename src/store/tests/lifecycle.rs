//! Creating, opening, using, backing up and refusing ledgers on real files.

use super::super::disk::{self, File};
use super::super::files;
use super::super::retention::Retention;
use super::super::rows::Identity;
use super::super::{Store, StoreError};
use super::*;
use crate::ledger::{AttemptState, Refusal};
use bytes::Bytes;
use std::fs;
use std::path::Path;

const HOUR: u64 = 3_600_000;

/// What a process killed now would leave behind.
fn image(of: &Fixture) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    for file in File::ALL {
        fs::copy(of.dir.path().join(file.name()), dir.path().join(file.name())).unwrap();
    }
    let clock = of.clock.clone();
    Fixture { dir, clock }
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

#[test]
fn what_was_acknowledged_is_there_after_a_restart() {
    let fixture = Fixture::new(100);
    let store = fixture.open();
    let boot = store.boot();
    assert!(is_admitted(&store.submit_blocking(admit(1, 1, boot, 40))));
    store.submit_blocking(start(1, 1)).unwrap();
    store.submit_blocking(settle(1, 1, 25)).unwrap();
    let record = store.read().unwrap().request(&key(1)).unwrap();
    drop(store);
    let store = fixture.open();
    assert_ne!(store.boot(), boot);
    assert_eq!(store.read().unwrap().request(&key(1)).unwrap(), record);
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
    let read = store.read().unwrap();
    let check = |request, state, failure| {
        let record = read.request(&key(request)).unwrap().unwrap();
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
    let read = store.read().unwrap();
    let live = read.live_requests().unwrap();
    assert_eq!(live.iter().map(|record| record.key).collect::<Vec<_>>(), [key(2)]);
    assert_eq!(read.live_requests_of(CredentialId(id(1))).unwrap(), live);
    assert_eq!(read.live_requests_of(CredentialId(id(2))).unwrap(), []);
    let account = AccountId(id(1));
    assert_eq!(read.requests(account).unwrap().len(), 2);
    assert_eq!(read.requests_by_id(account, RequestId(id(2))).unwrap(), live);
    assert_eq!(read.requests(AccountId(id(2))).unwrap(), []);
    let kinds: Vec<u64> = read.entries(account).unwrap().iter().map(|entry| entry.sequence).collect();
    assert_eq!(kinds, [1, 2, 3, 4]);
    assert_eq!(read.accounts().unwrap().len(), 1);
    assert_eq!(read.credentials(account).unwrap().len(), 1);
    assert_eq!(read.applications(account).unwrap(), []);
    let mut digest = [0; 32];
    digest[15] = 1;
    assert!(read.credential_by_digest(&digest).unwrap().is_some());
    assert!(read.credential_by_digest(&[9; 32]).unwrap().is_none());
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
async fn an_admission_nobody_waits_for_is_released() {
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
    // Whatever was sent before this is done when it is answered; the releases of the last ones go before the next.
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
fn low_disk_space_is_no_reason_to_keep_a_reservation() {
    let disk = media::SimulatedDisk::formatted();
    let clock = Arc::new(TestClock::at(1));
    let store = Store::start(Box::new(disk.clone()), clock, Retention::default()).unwrap();
    for command in opening(100) {
        store.submit_blocking(command).unwrap();
    }
    disk.set_free(0);
    // No admission has looked at the space before, so this one does.
    let outcome = store.submit_blocking(admit(1, 1, store.boot(), 10));
    assert!(matches!(outcome, Err(StoreError::Unavailable(_))), "{outcome:?}");
    assert_eq!(refusal(store.submit_blocking(settle(1, 1, 1))), Refusal::RequestNotFound);
    assert!(store.healthy());
}

#[tokio::test]
async fn bodies_are_kept_until_they_expire() {
    let fixture = tokio::task::spawn_blocking(|| Fixture::new(1)).await.unwrap();
    let store = fixture.open();
    assert_eq!(store.body(&key(1)).unwrap(), None);
    let body = Bytes::from(vec![b'x'; 300_000]);
    store.put_body(key(1), body.clone(), UnixMillis(2_000_000)).await.unwrap();
    drop(store);
    let store = fixture.open();
    assert_eq!(store.body(&key(1)).unwrap(), Some(body));
    assert_eq!(store.body(&key(2)).unwrap(), None);
    fixture.clock.set(2_000_000);
    assert_eq!(store.body(&key(1)).unwrap(), None);
}

/// The ledger is swept when it is opened, which makes the passing of time a matter of reopening.
#[test]
fn ended_requests_are_archived_and_at_last_forgotten() {
    let fixture = Fixture::new(1_000);
    let store = fixture.open();
    let boot = store.boot();
    for request in [1, 2, 3] {
        store.submit_blocking(admit(request, request, boot, 10)).unwrap();
    }
    store.submit_blocking(settle(1, 1, 10)).unwrap();
    store.submit_blocking(release(2, 2)).unwrap();
    drop(store);
    let begin = 1_000_000;
    let reopened_at = |hours: u64| {
        fixture.clock.set(begin + hours * HOUR);
        let store = fixture.open();
        // The sweep follows the first command.
        store.submit_blocking(Command::RevokeCredential { id: CredentialId(id(9)) }).unwrap_err();
        drop(store);
        fixture.open()
    };
    let store = reopened_at(23);
    let outcome = store.submit_blocking(admit(1, 9, store.boot(), 10)).unwrap();
    assert!(matches!(outcome, Outcome::Existing(_)));
    assert!(is_admitted(&store.submit_blocking(admit(2, 9, store.boot(), 10))));
    store.submit_blocking(settle(2, 9, 1)).unwrap();
    drop(store);
    let store = reopened_at(25);
    assert_eq!(refusal(store.submit_blocking(admit(1, 10, store.boot(), 10))), Refusal::ResultExpired);
    let outcome = store.submit_blocking(admit(2, 10, store.boot(), 10)).unwrap();
    assert!(matches!(outcome, Outcome::Existing(_)), "its last end is two hours ago");
    let record = store.read().unwrap().request(&key(1)).unwrap().unwrap();
    assert_eq!(record.latest().state, AttemptState::Completed);
    assert_eq!(store.read().unwrap().requests(AccountId(id(1))).unwrap().len(), 3);
    assert_sound(&store);
    drop(store);
    let store = reopened_at(30 * 24 + 25);
    assert_eq!(store.read().unwrap().request(&key(1)).unwrap(), None);
    assert!(is_admitted(&store.submit_blocking(admit(1, 11, store.boot(), 10))));
    assert_sound(&store);
}

#[test]
fn stored_time_never_goes_back() {
    let fixture = Fixture::new(100);
    fixture.clock.set(5);
    let store = fixture.open();
    store.submit_blocking(admit(1, 1, store.boot(), 1)).unwrap();
    let record = store.read().unwrap().request(&key(1)).unwrap().unwrap();
    assert_eq!(record.latest().created_at, UnixMillis(1_000_000));
    assert_sound(&store);
}

#[test]
fn two_processes_cannot_share_a_ledger() {
    let fixture = Fixture::new(1);
    let _store = fixture.open();
    assert!(matches!(fixture.try_open(), Err(StoreError::InUse(_))));
    let restored = Store::restore(fixture.dir.path(), Path::new("none"));
    assert!(matches!(restored, Err(StoreError::InUse(_))));
}

#[test]
fn a_ledger_is_never_created_over_anything() {
    let fixture = Fixture::new(50);
    let before = fs::read(fixture.dir.path().join("ledger.redb")).unwrap();
    assert!(unusable(Store::init(fixture.dir.path())).contains("left as it is"));
    assert_eq!(fs::read(fixture.dir.path().join("ledger.redb")).unwrap(), before);
    assert_eq!(spent(&fixture.open()), (0, 0));
    let missing = fixture.dir.path().join("missing");
    unusable(Store::init(&missing));
    assert!(!missing.exists());
}

/// Each case spoils one file; opening must say why and leave the file as it was.
#[test]
fn files_that_are_no_ledger_are_refused() {
    let check = |file: File, expect: &str, spoil: fn(&Path)| {
        let fixture = Fixture::new(50);
        let path = fixture.dir.path().join(file.name());
        spoil(&path);
        let before = fs::read(&path).ok();
        let why = unusable(fixture.try_open());
        assert!(why.contains(expect), "{expect:?} expected, but: {why}");
        assert_eq!(fs::read(&path).ok(), before, "{expect}");
    };
    for file in File::ALL {
        check(file, "create a ledger with", |path| fs::remove_file(path).unwrap());
        check(file, "is empty", |path| fs::write(path, b"").unwrap());
        check(file, "is no ledger file", |path| fs::write(path, b"PK\x03\x04 something else").unwrap());
        check(file, "is no ledger file", |path| fs::write(path, b"redb").unwrap());
        check(file, "damaged", |path| fs::write(path, b"redb\x1a\x0a\xa9\x0d\x0a").unwrap());
    }
    let fixture = Fixture::new(50);
    let path = fixture.dir.path().join("ledger.redb");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    unusable(fixture.try_open());
}

#[test]
fn truncated_files_are_refused() {
    for file in File::ALL {
        for part in [10, 100, 1_000, 4_096, 9_999] {
            let fixture = Fixture::new(50);
            let path = fixture.dir.path().join(file.name());
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..bytes.len() * part / 10_000]).unwrap();
            assert!(unusable(fixture.try_open()).contains("damaged"), "{part}");
        }
    }
}

#[test]
fn other_schemas_and_strange_databases_are_refused() {
    let check = |expect: &str, change: fn(&redb::Database)| {
        let fixture = Fixture::new(50);
        let path = fixture.dir.path().join("ledger.redb");
        change(&disk::open_existing(&path).unwrap());
        let why = unusable(fixture.try_open());
        assert!(why.contains(expect), "{expect:?} expected, but: {why}");
    };
    check("schema 2", |database| {
        let identity = Identity { schema: 2, epoch: 1 };
        files::write(database, |txn| files::set_identity(txn, identity)).unwrap();
    });
    check("do not belong together", |database| {
        let identity = Identity { schema: 1, epoch: 2 };
        files::write(database, |txn| files::set_identity(txn, identity)).unwrap();
    });
    let fixture = Fixture::new(50);
    let path = fixture.dir.path().join("ledger.redb");
    fs::remove_file(&path).unwrap();
    drop(disk::create(&path).unwrap());
    assert!(unusable(fixture.try_open()).contains("not one of this service"));
}

#[test]
fn a_changed_balance_is_not_served() {
    let fixture = Fixture::new(50);
    let path = fixture.dir.path().join("ledger.redb");
    let database = disk::open_existing(&path).unwrap();
    let rich = crate::ledger::Balances::default();
    files::write(&database, |txn| {
        let mut balances = txn.open_table(super::super::tables::BALANCES)?;
        super::super::tables::put(&mut balances, id(1).as_bytes(), &rich)
    })
    .unwrap();
    drop(database);
    assert!(unusable(fixture.try_open()).contains("other balances than its journal"));
}

#[test]
fn a_damaged_row_stops_admissions_but_not_its_neighbours() {
    let fixture = Fixture::new(50);
    let store = fixture.open();
    store.submit_blocking(admit(1, 1, store.boot(), 10)).unwrap();
    store.submit_blocking(admit(2, 2, store.boot(), 10)).unwrap();
    let raw = super::super::tables::request_key(&key(1));
    let spoiled = store.inner.shared.with_files(|files| {
        Ok(files::write(&files.ledger, |txn| {
            let mut requests = txn.open_table(super::super::tables::REQUESTS)?;
            requests.insert(raw.as_slice(), b"junk".as_slice())?;
            Ok(())
        })?)
    });
    spoiled.unwrap();
    store.submit_detached(settle(1, 1, 5));
    assert!(matches!(store.submit_blocking(settle(2, 2, 5)), Ok(Outcome::Request(_))));
    assert!(!store.healthy());
    let outcome = store.submit_blocking(admit(3, 3, store.boot(), 1));
    assert!(matches!(outcome, Err(StoreError::Unavailable(_))), "{outcome:?}");
    assert!(!store.audit().unwrap().ok);
}

#[test]
fn a_backup_made_under_load_is_a_ledger() {
    let fixture = Fixture::new(1_000);
    let store = fixture.open();
    let boot = store.boot();
    store.submit_blocking(admit(1, 1, boot, 10)).unwrap();
    store.submit_blocking(settle(1, 1, 10)).unwrap();
    store.submit_blocking(admit(2, 2, boot, 10)).unwrap();
    let backup = fixture.dir.path().join("backup.redb");
    store.backup(&backup).unwrap();
    assert!(unusable(store.backup(&backup)).contains("never replaces"));
    store.submit_blocking(settle(2, 2, 7)).unwrap();
    assert_eq!(spent(&store), (17, 0));
    drop(store);

    Store::restore(fixture.dir.path(), &backup).unwrap();
    let store = fixture.open();
    assert_eq!(spent(&store), (10, 0), "the open reservation is released");
    assert_sound(&store);
    drop(store);

    let elsewhere = tempfile::tempdir().unwrap();
    Store::restore(elsewhere.path(), &backup).unwrap();
    Store::restore(elsewhere.path(), &backup).unwrap();
    let path = elsewhere.path().join("ledger.redb");
    let database = disk::open_existing(&path).unwrap();
    assert_eq!(files::identity(&database, File::Ledger).unwrap().epoch, 3);
}

#[test]
fn a_bad_backup_replaces_nothing() {
    let fixture = Fixture::new(1_000);
    let backup = fixture.dir.path().join("backup.redb");
    fixture.open().backup(&backup).unwrap();
    let mut bytes = fs::read(&backup).unwrap();
    bytes.truncate(bytes.len() / 2);
    fs::write(&backup, bytes).unwrap();
    assert!(unusable(Store::restore(fixture.dir.path(), &backup)).contains("damaged"));
    let store = fixture.open();
    assert!(is_admitted(&store.submit_blocking(admit(1, 1, store.boot(), 10))));
    assert_sound(&store);
}

#[test]
fn an_interrupted_restore_is_noticed() {
    let fixture = Fixture::new(1_000);
    let backup = fixture.dir.path().join("backup.redb");
    fixture.open().backup(&backup).unwrap();
    let old = fs::read(fixture.dir.path().join("ledger.redb")).unwrap();
    Store::restore(fixture.dir.path(), &backup).unwrap();
    fs::write(fixture.dir.path().join("ledger.redb"), old).unwrap();
    assert!(unusable(fixture.try_open()).contains("run it again"));
    Store::restore(fixture.dir.path(), &backup).unwrap();
    assert_sound(&fixture.open());
}

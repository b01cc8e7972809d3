//! Backups made while the ledger works, and restoring them.

use super::super::{disk, schema};
use super::*;
use crate::ledger::records::EntryKind;
use std::fs;

/// A backup is the ledger as it stood between two commits, and an orderly one although work was
/// open.
#[test]
fn a_backup_made_under_load_is_a_prefix_of_the_ledger() {
    let fixture = Fixture::new(1_000_000);
    let store = fixture.open();
    let boot = store.boot();
    let backups: Vec<_> = std::thread::scope(|scope| {
        for client in 1..=4 {
            let store = &store;
            scope.spawn(move || {
                for request in (0..60).map(|number| client * 1_000 + number) {
                    store.submit_blocking(admit(request, request, boot, 10)).unwrap();
                    store.submit_blocking(settle(request, request, (request % 10) as u32)).unwrap();
                }
            });
        }
        let backup = |number: u32| {
            let path = fixture.dir.path().join(format!("backup-{number}"));
            store.backup(&path).map(|()| path).unwrap()
        };
        (0..3).map(backup).collect()
    });
    let account = AccountId(id(1));
    let journal = store.read().now().unwrap().entries(account, 0, usize::MAX).now().unwrap();
    assert!(unusable(store.backup(&backups[0])).contains("never replaces"));
    for backup in backups {
        let folder = tempfile::tempdir().unwrap();
        Store::restore(&StoreConfig::folder(folder.path()), &backup).unwrap();
        let clock = Arc::new(fixture.clock.clone());
        let restored =
            Store::open(&StoreConfig::folder(folder.path()), clock, Limits::default()).unwrap();
        assert_sound(&restored);
        let read = restored.read().now().unwrap();
        assert_eq!(
            read.live_requests().now().unwrap(),
            [],
            "reservations of the backup are released"
        );
        let entries = read.entries(account, 0, usize::MAX).now().unwrap();
        let same = entries.iter().zip(&journal).take_while(|(one, other)| one == other).count();
        let released = &entries[same..];
        assert!(
            released.iter().all(|entry| matches!(entry.kind, EntryKind::Release { .. })),
            "{released:?}"
        );
        assert_eq!(read.balances(account).now().unwrap(), entries.last().unwrap().after);
    }
}

#[test]
fn a_restored_ledger_is_the_backup_and_the_replaced_one_is_kept() {
    let fixture = Fixture::new(1_000);
    let store = fixture.open();
    let boot = store.boot();
    store.submit_blocking(admit(1, 1, boot, 10)).unwrap();
    store.submit_blocking(settle(1, 1, 10)).unwrap();
    store.submit_blocking(admit(2, 2, boot, 10)).unwrap();
    let backup = fixture.dir.path().join("backup.redb");
    store.backup(&backup).unwrap();
    store.submit_blocking(settle(2, 2, 7)).unwrap();
    assert_eq!(spent(&store), (17, 0));
    assert!(matches!(Store::restore(&fixture.config(), &backup), Err(StoreError::InUse(_))));
    drop(store);
    for epoch in [2, 3] {
        Store::restore(&fixture.config(), &backup).unwrap();
        if epoch == 2 {
            let folder = tempfile::tempdir().unwrap();
            for file in File::ALL {
                let kept = fixture.dir.path().join(format!("{}.replaced", file.name()));
                fs::copy(kept, folder.path().join(file.name())).unwrap();
            }
            let replaced = Store::open(
                &StoreConfig::folder(folder.path()),
                Arc::new(fixture.clock.clone()),
                Limits::default(),
            )
            .unwrap();
            assert_eq!(spent(&replaced), (17, 0));
            assert_sound(&replaced);
        }
        let database = disk::open_existing(&fixture.dir.path().join("ledger.redb")).unwrap();
        assert_eq!(schema::identity(&database, "ledger").unwrap().epoch, epoch);
    }
    let store = fixture.open();
    assert_eq!(spent(&store), (10, 0), "the open reservation is released");
    assert_sound(&store);
}

#[test]
fn a_bad_backup_replaces_nothing() {
    let fixture = Fixture::new(1_000);
    let backup = fixture.dir.path().join("backup.redb");
    fixture.open().backup(&backup).unwrap();
    let mut bytes = fs::read(&backup).unwrap();
    bytes.truncate(bytes.len() / 2);
    fs::write(&backup, bytes).unwrap();
    assert!(unusable(Store::restore(&fixture.config(), &backup)).contains("damaged"));
    let store = fixture.open();
    assert!(is_admitted(&store.submit_blocking(admit(1, 1, store.boot(), 10))));
    assert_sound(&store);
}

/// A restore that stops at any of its steps leaves the old ledger, or is noticed; when it is run
/// again, it completes.
#[test]
fn an_interrupted_restore_is_noticed_and_run_again() {
    let fixture = Fixture::new(1_000);
    let backup = fixture.dir.path().join("backup.redb");
    let store = fixture.open();
    store.backup(&backup).unwrap();
    store.submit_blocking(admit(1, 1, store.boot(), 10)).unwrap();
    store.submit_blocking(settle(1, 1, 10)).unwrap();
    drop(store);
    let path = |name: String| fixture.dir.path().join(name);
    let old = File::ALL.map(|file| fs::read(path(file.name().into())).unwrap());
    Store::restore(&fixture.config(), &backup).unwrap();
    let new = File::ALL.map(|file| fs::read(path(file.name().into())).unwrap());
    // The ledger comes first, as in `File::ALL`: (its file, the bodies' file).
    for (step, files) in [(0, [&old[0], &old[1]]), (1, [&old[0], &new[1]]), (2, [&new[0], &new[1]])]
    {
        for (file, bytes) in File::ALL.iter().zip(files) {
            fs::write(path(file.name().into()), bytes).unwrap();
            fs::write(path(file.unfinished()), &bytes[..bytes.len() / 2]).unwrap();
        }
        match step {
            0 => assert_eq!(spent(&fixture.open()), (10, 0)),
            1 => assert!(unusable(fixture.try_open()).contains("run it again")),
            _ => assert_eq!(spent(&fixture.open()), (0, 0)),
        }
        Store::restore(&fixture.config(), &backup).unwrap();
        let store = fixture.open();
        assert_eq!(spent(&store), (0, 0), "{step}");
        assert_sound(&store);
    }
}

//! Backups made while the ledger works, and restoring them.

use super::super::{disk, schema};
use super::*;
use crate::{LostRows, NodeFile, ReplacedState, RestoreReport};
use cresset_ledger::{AccountStatus, EntryKind};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

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
            store.backup(&BackupScope::Ledger, &path).map(|()| path).unwrap()
        };
        (0..3).map(backup).collect()
    });
    let account = AccountId(id(1));
    let journal = store.read().now().unwrap().entries(account, 0, usize::MAX).now().unwrap();
    assert!(unusable(store.backup(&BackupScope::Ledger, &backups[0])).contains("never replaces"));
    for backup in backups {
        let folder = tempfile::tempdir().unwrap();
        Store::restore(&StoreConfig::folder(folder.path()), &backup, RestoreScope::Ledger).unwrap();
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
    store.backup(&BackupScope::Ledger, &backup).unwrap();
    store.submit_blocking(settle(2, 2, 7)).unwrap();
    assert_eq!(spent(&store), (17, 0));
    assert!(matches!(
        Store::restore(&fixture.config(), &backup, RestoreScope::Ledger),
        Err(StoreError::InUse(_))
    ));
    drop(store);
    for epoch in [2, 3] {
        Store::restore(&fixture.config(), &backup, RestoreScope::Ledger).unwrap();
        if epoch == 2 {
            let folder = tempfile::tempdir().unwrap();
            for file in File::ALL {
                let kept = fixture.dir.path().join(format!("{}.replaced-1", file.name()));
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
    fixture.open().backup(&BackupScope::Ledger, &backup).unwrap();
    let mut bytes = fs::read(&backup).unwrap();
    bytes.truncate(bytes.len() / 2);
    fs::write(&backup, bytes).unwrap();
    assert!(
        unusable(Store::restore(&fixture.config(), &backup, RestoreScope::Ledger))
            .contains("damaged")
    );
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
    store.backup(&BackupScope::Ledger, &backup).unwrap();
    store.submit_blocking(admit(1, 1, store.boot(), 10)).unwrap();
    store.submit_blocking(settle(1, 1, 10)).unwrap();
    drop(store);
    let path = |name: String| fixture.dir.path().join(name);
    let old = File::ALL.map(|file| fs::read(path(file.name().into())).unwrap());
    Store::restore(&fixture.config(), &backup, RestoreScope::Ledger).unwrap();
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
        Store::restore(&fixture.config(), &backup, RestoreScope::Ledger).unwrap();
        let store = fixture.open();
        assert_eq!(spent(&store), (0, 0), "{step}");
        assert_sound(&store);
    }
}

/// A ledger with a request that was answered, and a backup of the node.
async fn answered() -> (Fixture, std::path::PathBuf) {
    let fixture = tokio::task::spawn_blocking(|| Fixture::new(1_000)).await.unwrap();
    let backup = fixture.dir.path().join("backup.node");
    let config = fixture.dir.path().join("cresset.toml");
    fs::write(&config, "[log]\n").unwrap();
    let store = fixture.open();
    store.submit(admit(1, 1, store.boot(), 10)).await.unwrap();
    store.put_body(key(1), answer(), UnixMillis(2_000_000)).await.unwrap();
    store.submit(settle(1, 1, 10)).await.unwrap();
    let files = vec![NodeFile { name: "cresset.toml".into(), path: config }];
    store.backup(&BackupScope::Node(files), &backup).unwrap();
    drop(store);
    (fixture, backup)
}

fn answer() -> bytes::Bytes {
    "the answer ".repeat(300).into()
}

#[tokio::test]
async fn a_node_s_backup_brings_its_answers_and_files() {
    let (fixture, backup) = answered().await;
    for (scope, restored_files) in [(RestoreScope::Ledger, 0), (RestoreScope::Node, 1)] {
        let folder = tempfile::tempdir().unwrap();
        let config = StoreConfig::folder(folder.path());
        let report = Store::restore(&config, &backup, scope).unwrap();
        assert_eq!((report.answers, report.restored_files.len()), (1, restored_files));
        let placed = fs::read_to_string(folder.path().join("cresset.toml"));
        assert_eq!(placed.ok().as_deref(), (restored_files == 1).then_some("[log]\n"));
        let clock = fixture.clock.clone();
        let store = Store::open(&config, Arc::new(clock.clone()), Limits::default()).unwrap();
        assert_eq!(store.body(&key(1)).await.unwrap(), Some(answer()));
        assert_eq!(spent(&store), (10, 0));
        assert_sound(&store);
        // It expires when it would have in the other folder.
        clock.set(2_000_000);
        assert_eq!(store.body(&key(1)).await.unwrap(), None);
        clock.set(1_000_000);
    }
}

/// Whatever byte of a backup is changed, wherever it is cut and whatever is appended: nothing is
/// replaced.
#[tokio::test]
async fn a_changed_backup_replaces_nothing() {
    let (fixture, backup) = answered().await;
    let sound = fs::read(&backup).unwrap();
    let before = fs::read(fixture.dir.path().join("ledger.redb")).unwrap();
    let seal = sound.len() - 48;
    // Bytes that pages use and others, and each of the seal's.
    let places = (0..seal).step_by(sound.len() / 30).chain(seal..sound.len());
    let mut changed: Vec<Vec<u8>> = places
        .map(|place| {
            let mut bytes = sound.clone();
            bytes[place] ^= 1;
            bytes
        })
        .collect();
    changed.extend([1, 47, 48, 49, 5_000].map(|cut| sound[..sound.len() - cut].to_vec()));
    changed.push([&sound[..], b"x"].concat());
    for (number, bytes) in changed.iter().enumerate() {
        fs::write(&backup, bytes).unwrap();
        let refused = unusable(Store::restore(&fixture.config(), &backup, RestoreScope::Node));
        assert!(refused.contains("damaged"), "{number}: {refused}");
        assert!(set_aside(fixture.dir.path()).is_empty(), "{number}");
    }
    assert!(fs::read(fixture.dir.path().join("ledger.redb")).unwrap() == before);
    assert_sound(&fixture.open());
}

/// Replaced files are kept, equal ones stay as they are, and a restore that stopped before its last
/// rename finds what it has kept.
#[tokio::test]
async fn the_files_that_a_backup_replaces_are_kept() {
    let (fixture, backup) = answered().await;
    let dir = fixture.dir.path();
    let (path, kept) = (dir.join("cresset.toml"), |number: u32| {
        fs::read_to_string(dir.join(format!("cresset.toml.replaced-{number}"))).ok()
    });
    let restore = || Store::restore(&fixture.config(), &backup, RestoreScope::Node).unwrap();
    assert_eq!(restore().restored_files, Vec::<std::path::PathBuf>::new());
    assert_eq!(kept(1), None, "it is the same file");
    for (content, number) in [("one", 2), ("two", 3)] {
        fs::write(&path, content).unwrap();
        let report = restore();
        assert_eq!(report.restored_files.iter().collect::<Vec<_>>(), [&path]);
        assert_eq!(report.replaced_files.len(), 3);
        assert_eq!(kept(number).as_deref(), Some(content));
    }
    // A restore stopped after it had kept the file, and one after that finds the name taken.
    fs::write(&path, "three").unwrap();
    fs::hard_link(&path, dir.join("cresset.toml.replaced-4")).unwrap();
    restore();
    assert_eq!((kept(4).as_deref(), kept(5)), (Some("three"), None));
    fs::write(dir.join("cresset.toml.replaced-5"), "another").unwrap();
    fs::write(&path, "four").unwrap();
    restore();
    assert_eq!((kept(5).as_deref(), kept(6).as_deref()), (Some("another"), Some("four")));
    assert_eq!(fs::read_to_string(&path).unwrap(), "[log]\n");
}

/// The contents of every file that was set aside, by name.
fn set_aside(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let kept = names.filter(|path| path.to_str().unwrap().contains(".replaced"));
    kept.map(|path| (path.to_str().unwrap().to_owned(), fs::read(&path).unwrap())).collect()
}

#[test]
fn no_restore_touches_what_another_one_set_aside() {
    let fixture = Fixture::new(1_000);
    let backup = fixture.dir.path().join("backup.redb");
    let store = fixture.open();
    store.backup(&BackupScope::Ledger, &backup).unwrap();
    store.submit_blocking(admit(1, 1, store.boot(), 10)).unwrap();
    store.submit_blocking(settle(1, 1, 10)).unwrap();
    drop(store);
    // A file that a person set aside.
    fs::write(fixture.dir.path().join("ledger.redb.replaced"), "kept").unwrap();
    let mut before = set_aside(fixture.dir.path());
    for number in 1..=3 {
        let report = Store::restore(&fixture.config(), &backup, RestoreScope::Ledger).unwrap();
        let names = File::ALL.map(|file| format!("{}.replaced-{number}", file.name()));
        assert_eq!(report.replaced_files, names.map(|name| fixture.dir.path().join(name)));
        drop(fixture.open());
        let after = set_aside(fixture.dir.path());
        assert_eq!(after.len(), before.len() + 2);
        assert!(before.iter().all(|(name, bytes)| after.get(name) == Some(bytes)), "{number}");
        before = after;
    }
}

/// Wherever the first restore stops, the files that it was to replace can be found when the second
/// one has ended, and lie together under one number.
#[test]
fn a_restore_that_is_run_again_keeps_the_original() {
    let fixture = Fixture::new(1_000);
    let dir = fixture.dir.path();
    let backup = dir.join("backup.redb");
    let store = fixture.open();
    store.backup(&BackupScope::Ledger, &backup).unwrap();
    store.submit_blocking(admit(1, 1, store.boot(), 10)).unwrap();
    store.submit_blocking(settle(1, 1, 10)).unwrap();
    drop(store);
    for stop in ["kept ledger", "kept both", "bodies in place"] {
        let image = image(&fixture);
        let path = |name: &str| image.dir.path().join(name);
        fs::hard_link(path("ledger.redb"), path("ledger.redb.replaced-1")).unwrap();
        if stop != "kept ledger" {
            fs::hard_link(path("bodies.redb"), path("bodies.redb.replaced-1")).unwrap();
        }
        if stop == "bodies in place" {
            let other = super::image(&fixture);
            Store::restore(&other.config(), &backup, RestoreScope::Ledger).unwrap();
            fs::rename(other.dir.path().join("bodies.redb"), path("bodies.redb")).unwrap();
            assert!(unusable(image.try_open()).contains("run it again"));
        }
        let report = Store::restore(&image.config(), &backup, RestoreScope::Ledger).unwrap();
        assert_eq!(report.replaced_files.len(), 2, "{stop}");
        let original = tempfile::tempdir().unwrap();
        for (file, kept) in File::ALL.iter().zip(&report.replaced_files) {
            assert!(kept.to_str().unwrap().ends_with(".replaced-1"), "{stop}: {kept:?}");
            fs::copy(kept, original.path().join(file.name())).unwrap();
        }
        let clock = Arc::new(fixture.clock.clone());
        let config = StoreConfig::folder(original.path());
        let replaced = Store::open(&config, clock, Limits::default()).unwrap();
        assert_eq!(spent(&replaced), (10, 0), "{stop}");
    }
}

/// A ledger whose credential 2 and account 2 are locked out after the backup, with credentials and
/// requests that the backup does not know.
fn locked_out() -> (Fixture, std::path::PathBuf) {
    let fixture = Fixture::new(1_000);
    let backup = fixture.dir.path().join("backup.redb");
    let store = fixture.open();
    let run = |command| store.submit_blocking(command).unwrap();
    let create = |number| Command::CreateAccount {
        id: AccountId(id(number)),
        name: "another".into(),
        plan: "basic".into(),
        opening: BucketAmounts::ZERO,
    };
    for command in [create(2), issue(2, 1, None), issue(3, 2, None), issue(4, 1, None)] {
        run(command);
    }
    run(Command::RevokeCredential { id: CredentialId(id(4)) });
    store.backup(&BackupScope::Ledger, &backup).unwrap();
    run(Command::RevokeCredential { id: CredentialId(id(2)) });
    let status = AccountStatus::Suspended;
    run(Command::SetAccountStatus { id: AccountId(id(2)), status });
    for command in [create(5), issue(5, 1, None), issue(6, 1, None)] {
        run(command);
    }
    run(admit(1, 1, store.boot(), 10));
    run(settle(1, 1, 10));
    drop(store);
    (fixture, backup)
}

/// Ids of credentials: kept revoked, valid again; ids of accounts kept suspended.
fn names(report: &RestoreReport) -> [Vec<u128>; 3] {
    let ids = |rows: &[Credential]| rows.iter().map(|row| row.id.0.as_u128()).collect();
    let suspended = report.kept_suspended.iter().map(|row| row.id.0.as_u128()).collect();
    [ids(&report.kept_revoked), ids(&report.valid_again), suspended]
}

#[test]
fn a_restore_keeps_out_who_was_locked_out() {
    let (fixture, backup) = locked_out();
    let report = Store::restore(&fixture.config(), &backup, RestoreScope::Ledger).unwrap();
    assert_eq!(names(&report), [vec![2], vec![], vec![2]]);
    assert_eq!(report.replaced, ReplacedState::Read);
    assert_eq!(report.lost, Some(LostRows { accounts: 1, credentials: 2, requests: 1 }));
    // And so does every restore after it.
    let again = Store::restore(&fixture.config(), &backup, RestoreScope::Ledger).unwrap();
    assert_eq!(names(&again), [vec![2], vec![], vec![2]]);
    let store = fixture.open();
    let read = store.read().now().unwrap();
    let revoked = |number| {
        let row = read.credential(CredentialId(id(number))).now().unwrap().unwrap();
        row.revoked_at.is_some()
    };
    assert_eq!([1, 2, 3, 4].map(revoked), [false, true, false, true]);
    let account = read.account(AccountId(id(2))).now().unwrap().unwrap();
    assert_eq!(account.status, AccountStatus::Suspended);
    assert_sound(&store);
}

#[test]
fn a_restore_names_the_credentials_that_are_valid_again() {
    let (_kept, backup) = locked_out();
    let empty = tempfile::tempdir().unwrap();
    let config = StoreConfig::folder(empty.path());
    // There is nothing to replace; then a ledger that is another one; then one that is damaged.
    let report = Store::restore(&config, &backup, RestoreScope::Ledger).unwrap();
    assert_eq!(names(&report), [vec![], vec![1, 2, 3], vec![]]);
    assert_eq!((&report.replaced, report.replaced_files.len()), (&ReplacedState::Absent, 0));
    let (fixture, _) = locked_out();
    let fresh = Fixture::new(1);
    let report = Store::restore(&fresh.config(), &backup, RestoreScope::Ledger).unwrap();
    assert_eq!(names(&report), [vec![], vec![2, 3], vec![]]);
    let ledger = fixture.dir.path().join("ledger.redb");
    let bytes = fs::read(&ledger).unwrap();
    fs::write(&ledger, &bytes[..bytes.len() / 3]).unwrap();
    let report = Store::restore(&fixture.config(), &backup, RestoreScope::Ledger).unwrap();
    assert_eq!(names(&report), [vec![], vec![1, 2, 3], vec![]]);
    assert!(matches!(report.replaced, ReplacedState::Unreadable(_)));
    assert_eq!((report.replaced_files.len(), report.lost), (2, None));
    assert_sound(&fixture.open());
}

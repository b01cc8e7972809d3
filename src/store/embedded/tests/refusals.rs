//! Files that are no ledger, or none that this build reads, are refused with a reason and left as
//! they are.

use super::super::disk;
use super::super::rows::FileIdentity;
use super::super::schema::SCHEMA;
use super::super::tables;
use super::*;
use crate::embedded::tables::OrFault;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

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
        check(file, "is no ledger file", |path| {
            fs::write(path, b"PK\x03\x04 something else").unwrap();
        });
        check(file, "is no ledger file", |path| fs::write(path, b"redb").unwrap());
        check(file, "damaged", |path| fs::write(path, b"redb\x1a\x0a\xa9\x0d\x0a").unwrap());
        check(file, "cannot be read", |path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        });
    }
}

#[test]
fn truncated_files_are_refused_and_left_alone() {
    for file in File::ALL {
        for part in [10, 100, 1_000, 4_096, 9_999] {
            let fixture = Fixture::new(50);
            let path = fixture.dir.path().join(file.name());
            let mut bytes = fs::read(&path).unwrap();
            bytes.truncate(bytes.len() * part / 10_000);
            fs::write(&path, &bytes).unwrap();
            assert!(unusable(fixture.try_open()).contains("damaged"), "{part}");
            assert!(fs::read(&path).unwrap() == bytes, "{part}: the file was changed");
        }
    }
}

/// Bytes appended to a file are no part of the database.
#[test]
fn extended_files_lose_nothing() {
    for file in File::ALL {
        let fixture = Fixture::new(50);
        let path = fixture.dir.path().join(file.name());
        let mut bytes = fs::read(&path).unwrap();
        bytes.extend([0xff; 10_000]);
        fs::write(&path, &bytes).unwrap();
        match fixture.try_open() {
            Ok(store) => {
                assert!(is_admitted(&store.submit_blocking(admit(1, 1, store.boot(), 50))));
                assert_sound(&store);
            }
            Err(StoreError::Unusable(why)) => {
                assert!(why.contains("damaged"), "{why}");
                assert!(fs::read(&path).unwrap() == bytes, "the file was changed");
            }
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn files_that_may_not_be_written_or_read_are_refused() {
    for mode in [0o000, 0o444] {
        let fixture = Fixture::new(50);
        let path = fixture.dir.path().join("ledger.redb");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        if fs::OpenOptions::new().write(true).open(&path).is_ok() {
            println!("skipped: this user may write to every file");
            return;
        }
        let why = unusable(fixture.try_open());
        assert!(why.contains("cannot be read") && why.contains("ermission denied"), "{why}");
    }
}

#[test]
fn files_of_newer_builds_are_refused_and_left_alone() {
    for file in File::ALL {
        let schema = SCHEMA + 1;
        let fixture = Fixture::new(50);
        let path = fixture.dir.path().join(file.name());
        let database = disk::open_existing(&path).unwrap();
        tables::write(&database, |txn| {
            tables::set_identity(txn, FileIdentity { schema, epoch: 1 })
        })
        .unwrap();
        drop(database);
        let read = || File::ALL.map(|file| fs::read(fixture.dir.path().join(file.name())).unwrap());
        let before = read();
        let why = unusable(fixture.try_open());
        assert!(
            why.contains(&format!("has schema {schema}")) && why.contains("left as it is"),
            "{why}"
        );
        // At most, the other file was opened; its content is the same.
        let place = File::ALL.iter().position(|other| *other == file).unwrap();
        assert!(read()[place] == before[place], "the file was changed");
    }
}

const OLDER: &str = "has a format from before version 0.2.0 and is left as it is: the last commit that reads it is 0b3e359a";

/// Gives a file the mark of the formats before schemas began at 1, with one of their numbers.
fn age(path: &Path, schema: u32) {
    let database = disk::open_existing(path).unwrap();
    tables::write(&database, |txn| {
        let mut meta = txn.open_table(tables::META).or_fault()?;
        meta.remove(tables::FORMAT).or_fault()?;
        tables::put(&mut meta, tables::OLDER_FORMAT, &FileIdentity { schema, epoch: 1 })
    })
    .unwrap();
}

/// Names and bytes of everything in a folder.
fn everything_in(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

#[test]
fn folders_of_an_older_format_are_refused_and_left_alone() {
    let backups = tempfile::tempdir().unwrap();
    let backup = backups.path().join("backup");
    Fixture::new(50).open().backup(&BackupScope::Ledger, &backup).unwrap();
    for schema in 1..=7 {
        let fixture = Fixture::new(50);
        for file in File::ALL {
            age(&fixture.dir.path().join(file.name()), schema);
        }
        let before = everything_in(fixture.dir.path());
        let expect = format!("ledger.redb {OLDER}");
        assert_eq!(unusable(fixture.try_open()), expect);
        assert_eq!(unusable(Store::inspect(&fixture.config())), expect);
        let restored = Store::restore(&fixture.config(), &backup, RestoreScope::Ledger);
        assert_eq!(unusable(restored), expect);
        assert!(unusable(Store::init(&fixture.config())).contains("left as it is"));
        assert!(everything_in(fixture.dir.path()) == before, "the folder was changed");
    }
}

/// A file that came from elsewhere is found by itself.
#[test]
fn one_file_of_an_older_format_is_refused_and_left_alone() {
    for file in File::ALL {
        let fixture = Fixture::new(50);
        let path = fixture.dir.path().join(file.name());
        age(&path, 1);
        let before = fs::read(&path).unwrap();
        assert_eq!(unusable(fixture.try_open()), format!("{} {OLDER}", file.name()));
        assert!(fs::read(&path).unwrap() == before, "the file was changed");
    }
}

/// Some older backups have no seal, and are named for what they are all the same.
#[test]
fn a_backup_of_an_older_format_is_refused() {
    let fixture = Fixture::new(50);
    let (ledger, folder) = (fixture.dir.path().join("ledger.redb"), tempfile::tempdir().unwrap());
    let backup = folder.path().join("backup");
    fixture.open().backup(&BackupScope::Ledger, &backup).unwrap();
    let mut bytes = fs::read(&backup).unwrap();
    bytes.truncate(bytes.len() - 48);
    fs::write(&backup, bytes).unwrap();
    age(&backup, 2);
    let before = [&backup, &ledger].map(|path| fs::read(path).unwrap());
    let refused = Store::restore(&fixture.config(), &backup, RestoreScope::Ledger);
    assert_eq!(unusable(refused), format!("the backup {OLDER}"));
    assert!([&backup, &ledger].map(|path| fs::read(path).unwrap()) == before);
    fixture.open();
}

#[test]
fn strange_databases_are_refused() {
    let fixture = Fixture::new(50);
    let path = fixture.dir.path().join("ledger.redb");
    let database = disk::open_existing(&path).unwrap();
    tables::write(&database, |txn| {
        tables::set_identity(txn, FileIdentity { schema: SCHEMA, epoch: 2 })
    })
    .unwrap();
    drop(database);
    assert!(unusable(fixture.try_open()).contains("do not belong together"));
    fs::remove_file(&path).unwrap();
    drop(disk::create(&path).unwrap());
    assert!(unusable(fixture.try_open()).contains("but no ledger"));
}

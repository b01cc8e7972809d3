//! Files that are no ledger, or none that this build reads, are refused with a reason and left as
//! they are.

use super::super::disk;
use super::super::files;
use super::super::rows::FileIdentity;
use super::super::schema::SCHEMA;
use super::*;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

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
    for (file, schema) in
        [(File::Ledger, SCHEMA + 1), (File::Bodies, SCHEMA + 1), (File::Ledger, 0)]
    {
        let fixture = Fixture::new(50);
        let path = fixture.dir.path().join(file.name());
        let database = disk::open_existing(&path).unwrap();
        files::write(&database, |txn| files::set_identity(txn, FileIdentity { schema, epoch: 1 }))
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

#[test]
fn strange_databases_are_refused() {
    let fixture = Fixture::new(50);
    let path = fixture.dir.path().join("ledger.redb");
    let database = disk::open_existing(&path).unwrap();
    files::write(&database, |txn| {
        files::set_identity(txn, FileIdentity { schema: SCHEMA, epoch: 2 })
    })
    .unwrap();
    drop(database);
    assert!(unusable(fixture.try_open()).contains("do not belong together"));
    fs::remove_file(&path).unwrap();
    drop(disk::create(&path).unwrap());
    assert!(unusable(fixture.try_open()).contains("but no ledger"));
}

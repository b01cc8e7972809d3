//! What a start reads of the file that grows with retention, and what its pages take in memory.

use super::super::tables::request_key;
use super::super::{bodies, files};
use super::*;
use crate::StoredBody;
use crate::backend::Backend;
use crate::settings::LedgerSettings;
use bytes::Bytes;
use redb::{Builder, DatabaseError, ReadableDatabase, ReadableTable};
use std::fs;

const DAY_MS: u64 = 24 * 3_600_000;

/// Whether `bodies.redb` can be opened without reading all of it.
fn is_open_at_once(of: &Fixture) -> bool {
    let mut builder = Builder::new();
    builder.set_repair_callback(redb::RepairSession::abort);
    match builder.open(image(of).dir.path().join(File::Bodies.name())) {
        Ok(_) => true,
        Err(DatabaseError::RepairAborted) => false,
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_kill_after_an_answer_leaves_a_file_that_is_open_at_once() {
    let fixture = Fixture::new(100);
    let store = fixture.open();
    store.submit_blocking(admit(1, 1, store.boot(), 10)).unwrap();
    keep_answer(&store, 1, &Bytes::from_static(b"nobody paid for this"));
    assert!(is_open_at_once(&fixture));
    let killed = image(&fixture);
    drop(store);
    // The start removes an answer whose settlement never came.
    let store = killed.open();
    assert_eq!(store.body(&key(1)).now().unwrap(), None);
    assert!(is_open_at_once(&killed));
}

#[test]
fn a_kill_after_a_sweep_leaves_a_file_that_is_open_at_once() {
    let fixture = Fixture::new(100);
    let store = fixture.open();
    store.submit_blocking(admit(1, 1, store.boot(), 10)).unwrap();
    store.submit_blocking(settle(1, 1, 1)).unwrap();
    drop(store);
    fixture.clock.set(40 * DAY_MS);
    let backend = backend_of(&fixture);
    backend.sweep(fixture.clock.now(), &Limits::default()).unwrap();
    assert!(backend.view().unwrap().archive().unwrap().first().unwrap().is_some());
    assert!(is_open_at_once(&fixture));
}

fn backend_of(fixture: &Fixture) -> EmbeddedBackend {
    let config = fixture.files();
    EmbeddedBackend::open_on(super::super::lock(&config).unwrap()).unwrap()
}

/// A killed ledger with two answers, of which the first is damaged, and a later commit.
fn damaged(answers: &[Bytes; 2]) -> Fixture {
    let fixture = Fixture::new(100);
    let store = fixture.open();
    for (request, answer) in (1..).zip(answers) {
        store.submit_blocking(admit(request, request, store.boot(), 10)).unwrap();
        keep_answer(&store, request, answer);
        store.submit_blocking(settle(request, request, 1)).unwrap();
    }
    drop(store);
    let store = fixture.open();
    store.submit_blocking(admit(3, 3, store.boot(), 10)).unwrap();
    keep_answer(&store, 3, &Bytes::from_static(b"the last"));
    store.submit_blocking(settle(3, 3, 1)).unwrap();
    let killed = image(&fixture);
    let path = killed.dir.path().join(File::Bodies.name());
    let mut bytes = fs::read(&path).unwrap();
    let starts = bytes.windows(100).enumerate();
    let starts = starts.filter(|(_, bytes)| **bytes == answers[0][..100]);
    let starts: Vec<usize> = starts.map(|(place, _)| place).collect();
    for place in starts {
        bytes[place] ^= 1;
    }
    fs::write(&path, bytes).unwrap();
    killed
}

/// After a kill the pages of the answers are not checked before the start. A damaged one is told by
/// whoever reads it, the others are served, and the audit of everything finds it for good.
#[test]
fn a_damaged_answer_is_told_after_a_kill() {
    let answers = [b'x', b'y'].map(|letter| Bytes::from(vec![letter; 900]));
    let killed = damaged(&answers);
    let store = killed.open();
    assert!(matches!(store.body(&key(1)).now(), Err(StoreError::Unavailable(_))));
    assert_eq!(store.body(&key(2)).now().unwrap().as_ref(), Some(&answers[1]));
    assert!(store.healthy());
    assert!(store.inner.shared.owes_full_audit(DAY_MS));
    assert!(!store.audit().unwrap().ok);
    assert!(!store.healthy());
    let refused = store.submit_blocking(admit(4, 4, store.boot(), 1));
    assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    drop(store);
    assert!(unusable(killed.try_open()).contains("breaks its own rules"));
}

/// Damage that ends the process would be told by none, so the second start in a row after a kill
/// looks for it in every page.
#[test]
fn a_damaged_answer_is_told_after_two_kills_in_a_row() {
    let answers = [b'x', b'y'].map(|letter| Bytes::from(vec![letter; 900]));
    let killed = damaged(&answers);
    let store = killed.open();
    let killed_again = image(&killed);
    drop(store);
    assert!(unusable(killed_again.try_open()).contains("bodies.redb"));
}

/// Where nothing bounds it, a list of many rows would fill the memory with the pages it read.
#[test]
fn pages_take_no_more_memory_than_the_operator_allows() {
    const MIB: usize = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let config = EmbeddedConfig {
        settings: LedgerSettings { cache_mib: 1, ..LedgerSettings::default() },
        ..EmbeddedConfig::new(dir.path())
    };
    super::super::init(&config).unwrap();
    let backend = EmbeddedBackend::open_on(super::super::lock(&config).unwrap()).unwrap();
    let rows: Vec<_> = (0..6_000).map(|number| (key(number), noise(number))).collect();
    let work = |files: &files::Files| {
        bodies::write(&files.bodies, |txn| {
            let mut answers = bodies::AnswerTable::open(txn)?;
            rows.iter().try_for_each(|(key, body)| answers.put(&request_key(key), body))
        })?;
        for (key, body) in &rows {
            assert_eq!(bodies::read(files, key, UnixMillis(0))?.as_ref(), Some(body));
        }
        Ok(files.bodies.cache_stats().used_bytes())
    };
    let held = backend.with_files(work).unwrap();
    assert!(held <= MIB + MIB / 4, "{held}");
}

/// An answer that is not compressed.
fn noise(request: u128) -> StoredBody {
    let mut random = super::media::Random(request as u64);
    body_of((0..100).flat_map(|_| random.next().to_be_bytes()).collect(), u64::MAX)
}

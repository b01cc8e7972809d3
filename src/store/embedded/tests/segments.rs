//! Closed parts of the journal: read as one with the live entries, found when they are damaged or
//! gone, and part of every backup.

use super::super::disk::{Disk, LockedFolder};
use super::super::tables;
use super::faults::Bench;
use super::media::SimulatedDisk;
use super::*;
use crate::backend::LedgerReader;
use crate::embedded::tables::OrFault;
use crate::scope::{BackupScope, RestoreScope};
use crate::shared::StoreShared;
use crate::writer::Writer;
use crate::{AuditPolicy, OpenProgress, prepare};
use cresset_ledger::audit::{self, AuditSource, JournalChain, JournalHeads, unpaced};
use redb::ReadableTableMetadata;
use std::fs;
use std::path::Path;

/// Entries of one closed part.
const PART: u64 = 10;
const REQUESTS: u128 = 40;

fn spend(bench: &mut Bench, requests: impl Iterator<Item = u128>) {
    let boot = bench.shared.boot();
    for request in requests {
        bench.detach(vec![admit(request, request, boot, 2), settle(request, request, 1)]);
    }
}

/// A ledger with many closed parts, and a second account that has entries only in the first one.
fn closed() -> (SimulatedDisk, TestClock, Bench) {
    let disk = SimulatedDisk::formatted().closing_parts_of(PART);
    let clock = TestClock::at(1_000_000);
    let mut bench = Bench::open(&disk, &clock).unwrap();
    bench.detach(opening(1_000));
    let opening = BucketAmounts { trial: Microcredits::new(7).unwrap(), ..BucketAmounts::ZERO };
    let (id, name, plan) = (AccountId(id(2)), "still".to_owned(), "basic".to_owned());
    bench.detach(vec![Command::CreateAccount { id, name, plan, opening }]);
    spend(&mut bench, 1..=REQUESTS);
    (disk, clock, bench)
}

fn live_entries(bench: &Bench) -> u64 {
    bench.backend.view().unwrap().table(tables::ENTRIES).unwrap().len().unwrap()
}

/// Everything that readers of the journal see.
fn seen(bench: &Bench) -> (Vec<JournalEntry>, Vec<Vec<JournalEntry>>, Vec<Option<JournalEntry>>) {
    let view = bench.backend.view().unwrap();
    let all: Vec<_> = AuditSource::entries(&view, &JournalHeads::default())
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let statement = |account| {
        let (mut after, mut rows) = (0, Vec::new());
        loop {
            let page = view.entries_of(account, after, 7).unwrap();
            let Some(last) = page.last() else { return rows };
            after = last.sequence;
            rows.extend(page);
        }
    };
    let ids = [1, 2, 3].map(|account| AccountId(id(account)));
    let single = (0..=all.len() as u64 + 1).flat_map(|at| {
        let entry = AuditSource::entry(&view, JournalChain::Shared, at).unwrap();
        ids.map(|account| view.entry_of(account, at).unwrap()).into_iter().chain([entry])
    });
    let single = single.collect();
    (all, ids.map(statement).into(), single)
}

#[test]
fn closed_parts_and_live_entries_are_one_journal() {
    let (disk, _, mut bench) = closed();
    let (before, report) = (seen(&bench), bench.report());
    assert_eq!(live_entries(&bench), report.entries);
    bench.close_parts();
    let expect = report.entries / PART - 1;
    assert_eq!(disk.segments().len() as u64, expect);
    assert_eq!(live_entries(&bench), report.entries - expect * PART);
    assert!(seen(&bench) == before);
    assert_eq!(bench.report().entries, report.entries);
    assert_eq!(bench.report().violations, Vec::<String>::new());
    let mut bench = bench.reopen();
    assert!(seen(&bench) == before);
    // What came from closed parts alone is still known: balances go on from there.
    let account = AccountId(id(2));
    let (bucket, units) = (Bucket::Trial, Microcredits::new(5).unwrap());
    let reference = "more".into();
    bench.detach(vec![Command::Grant { account, bucket, units, reference }]);
    spend(&mut bench, 100..=110);
    let view = bench.backend.view().unwrap();
    let from = before.0.last().unwrap();
    let from = cresset_ledger::JournalHead { sequence: from.sequence, hash: from.hash };
    let news = audit::since(&view, from.into(), &unpaced).unwrap();
    assert_eq!((news.entries, news.violations), (23, vec![]));
    drop(view);
    bench.close_parts();
    assert_eq!(bench.report().violations, Vec::<String>::new());
}

/// A part that is closed and whose live rows were not removed yet is read once.
#[test]
fn leftovers_of_a_closed_part_do_no_harm() {
    let (disk, clock, mut bench) = closed();
    let before = seen(&bench);
    bench.seal();
    assert!(bench.backend.close_journal_part(&unpaced).unwrap());
    // It was written and is not registered: the next start does not know of it, and closes it anew.
    drop(bench);
    let mut bench = Bench::open(&disk, &clock).unwrap();
    assert!(seen(&bench) == before);
    assert_eq!(disk.segments().len(), 1);
    assert!(bench.backend.close_journal_part(&unpaced).unwrap());
    bench.register_part();
    assert_eq!(disk.segments().len(), 1);
    assert_eq!(live_entries(&bench) as usize, before.0.len());
    assert!(seen(&bench) == before);
    assert_eq!(bench.report().violations, Vec::<String>::new());
    bench.sweep();
    assert_eq!(live_entries(&bench) as usize, before.0.len() - PART as usize);
    assert!(seen(&bench) == before);
}

/// Damage to a closed part's file is named, with the file, at the start and by every audit.
#[test]
fn a_damaged_or_missing_part_is_named() {
    let spoilt: [fn(&SimulatedDisk, &[String]); 4] = [
        |disk, names| disk.remove(&names[2]),
        |disk, names| disk.spoil(&names[2], |bytes| bytes.truncate(bytes.len() / 2)),
        |disk, names| disk.spoil(&names[2], |bytes| bytes.fill(0)),
        |disk, names| {
            let other = disk.content(&names[1]);
            disk.spoil(&names[2], |bytes| *bytes = other);
        },
    ];
    for (case, spoil) in spoilt.into_iter().enumerate() {
        let (disk, clock, mut bench) = closed();
        bench.close_parts();
        let bench = bench.reopen();
        let names = disk.segments();
        spoil(&disk, &names);
        drop(bench);
        let why = unusable(Bench::open(&disk, &clock));
        assert!(why.contains(&names[2]) && why.contains("closed part"), "{case}: {why}");
        let backend = Arc::new(EmbeddedBackend::open_on(Arc::new(disk.clone())).unwrap());
        let found = audit::everything(&backend.view().unwrap(), &unpaced).unwrap().violations;
        assert!(found.iter().any(|found| found.contains(&names[2])), "{case}: {found:?}");
    }
}

/// A row that was changed inside a closed part.
#[test]
fn the_audit_of_everything_reads_closed_parts() {
    let (disk, clock, mut bench) = closed();
    bench.close_parts();
    drop(bench.reopen());
    let name = disk.segments().remove(1);
    disk.change(&name, |txn| {
        let mut entries = txn.open_table(tables::ENTRIES).or_fault()?;
        let key = (PART + 5).to_be_bytes();
        let mut entry: JournalEntry = tables::get(&entries, &key)?.unwrap();
        entry.at = UnixMillis(entry.at.0 + 1);
        tables::put(&mut entries, &key, &entry)
    });
    let bench = Bench::open(&disk, &clock).unwrap();
    let found = bench.report().violations;
    assert!(found.iter().any(|found| found.contains("breaks the chain")), "{found:?}");
}

/// The writer of a ledger in a real folder, without its thread.
fn in_folder(dir: &Path) -> (Arc<EmbeddedBackend>, Arc<StoreShared>, Writer<EmbeddedBackend>) {
    let folder = ShortParts(LockedFolder::lock(dir).unwrap());
    let backend = Arc::new(EmbeddedBackend::open_on(Arc::new(folder)).unwrap());
    let clock = Arc::new(TestClock::at(1_000_000));
    let (shared, writer) =
        prepare(&backend, clock, Limits::default(), AuditPolicy::Always, &OpenProgress::default())
            .unwrap();
    (backend, shared, writer)
}

/// A folder that closes short parts of the journal.
struct ShortParts(LockedFolder);

impl Disk for ShortParts {
    fn open(&self, file: File, check_pages: bool) -> Result<redb::Database, StoreError> {
        self.0.open(file, check_pages)
    }
    fn create_segment(&self, name: &str) -> Result<redb::Database, StoreError> {
        self.0.create_segment(name)
    }
    fn open_unfinished_segment(&self, name: &str) -> Result<redb::ReadOnlyDatabase, StoreError> {
        self.0.open_unfinished_segment(name)
    }
    fn finish_segment(&self, name: &str) -> Result<(), StoreError> {
        self.0.finish_segment(name)
    }
    fn open_segment(&self, name: &str) -> Result<redb::ReadOnlyDatabase, StoreError> {
        self.0.open_segment(name)
    }
    fn segment_entries(&self) -> u64 {
        PART
    }
    fn free_bytes(&self) -> std::io::Result<u64> {
        self.0.free_bytes()
    }
}

fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("journal-"))
        .collect();
    names.sort();
    names
}

/// On real files: a backup is one file with the whole journal, a ledger restored from it has the
/// same journal and closes the same parts, and the replaced ledger keeps its own.
#[test]
fn a_backup_holds_closed_parts_and_a_restore_keeps_those_there_are() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = Fixture::new(1_000);
    let store = fixture.open();
    for request in 1..=REQUESTS {
        store.submit_blocking(admit(request, request, store.boot(), 2)).unwrap();
        store.submit_blocking(settle(request, request, 1)).unwrap();
    }
    drop(store);
    let close = || {
        let (backend, shared, mut writer) = in_folder(fixture.dir.path());
        shared.audit_news(&*backend.audit_source().unwrap(), &unpaced).unwrap();
        writer.seal().unwrap();
        while backend.close_journal_part(&unpaced).unwrap() {
            while writer.sweep().unwrap() {}
        }
        writer.close();
    };
    close();
    let names = names_in(fixture.dir.path());
    assert_eq!(names.len() as u64, 81 / PART - 1);
    let mode = fs::metadata(fixture.dir.path().join(&names[0])).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let statement = |store: &Store| {
        store.read().now().unwrap().entries(AccountId(id(1)), 0, usize::MAX).now().unwrap()
    };
    let store = fixture.open();
    let before = statement(&store);
    assert_eq!(before.len(), 81);
    assert_sound(&store);
    let copy = fixture.dir.path().join("copy");
    store.backup(&BackupScope::Ledger, &copy).unwrap();
    drop(store);
    let elsewhere = tempfile::tempdir().unwrap();
    Store::restore(&StoreConfig::folder(elsewhere.path()), &copy, RestoreScope::Ledger).unwrap();
    assert_eq!(names_in(elsewhere.path()), [""; 0]);
    Store::restore(&fixture.config(), &copy, RestoreScope::Ledger).unwrap();
    assert_eq!(names_in(fixture.dir.path()), names);
    let store = fixture.open();
    assert_eq!(statement(&store), before);
    assert_sound(&store);
    drop(store);
    close();
    assert_eq!(names_in(fixture.dir.path()), names);
    let store = fixture.open();
    assert_eq!(statement(&store), before);
    assert_sound(&store);
}

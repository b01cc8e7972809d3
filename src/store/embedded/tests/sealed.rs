//! Seals: a start reads what came after the last one, finds damage there and in every account, and
//! leaves the rest to the audit of everything.

use super::super::disk::{self, Disk, LockedFolder};
use super::super::files::{Files, PageCheck};
use super::super::rows::SealedPosition;
use super::super::tables::{self, Definition, OrFault};
use super::*;
use crate::auditor::AuditTurns;
use crate::backend::LedgerReader;
use crate::shared::StoreShared;
use crate::{AuditReport, backend::Backend};
use cresset_ledger::audit::unpaced;
use cresset_ledger::{JournalHead, RequestRecord, StateResult};
use redb::WriteTransaction;
use std::thread;

/// A ledger of two accounts and three settled requests, sealed at an orderly stop.
fn sealed() -> Fixture {
    let fixture = Fixture::new(100);
    let store = fixture.open();
    let account = Command::CreateAccount {
        id: AccountId(id(2)),
        name: "still".into(),
        plan: "basic".into(),
        opening: BucketAmounts::ZERO,
    };
    store.submit_blocking(account).unwrap();
    for request in 1..=3 {
        store.submit_blocking(admit(request, request, store.boot(), 10)).unwrap();
        store.submit_blocking(settle(request, request, 4)).unwrap();
    }
    drop(store);
    fixture
}

/// What a process that was killed left behind: one settled request after the seal.
fn with_news() -> Fixture {
    let fixture = sealed();
    let store = fixture.open();
    store.submit_blocking(admit(9, 9, store.boot(), 10)).unwrap();
    store.submit_blocking(settle(9, 9, 4)).unwrap();
    image(&fixture)
}

fn change(fixture: &Fixture, change: impl FnOnce(&WriteTransaction) -> StateResult) {
    let path = fixture.dir.path().join("ledger.redb");
    tables::write(&disk::open_existing(&path).unwrap(), change).unwrap();
}

fn seal_of(fixture: &Fixture) -> Option<SealedPosition> {
    let folder: Arc<dyn Disk> = Arc::new(LockedFolder::lock(fixture.dir.path()).unwrap());
    Files::open(&folder, PageCheck::Everything).unwrap().seal().unwrap()
}

fn audit_everything(fixture: &Fixture) -> AuditReport {
    Store::inspect(&fixture.config()).unwrap()
}

/// What a start audits.
fn audit_at_start(fixture: &Fixture) -> AuditReport {
    let config = fixture.files();
    let backend = Arc::new(EmbeddedBackend::open_on(super::super::lock(&config).unwrap()).unwrap());
    let (reader, clock) = (Arc::clone(&backend), Arc::new(fixture.clock.clone()));
    let shared = StoreShared::new(reader as Arc<dyn LedgerReader>, 1, clock, 0);
    shared.resume(backend.seal().unwrap(), false);
    shared.audit_at_start(&unpaced).unwrap()
}

#[test]
fn a_start_reads_what_came_after_the_seal() {
    let read = |fixture: &Fixture| {
        let report = audit_at_start(fixture);
        assert_eq!(report.violations, Vec::<String>::new());
        (report.entries, report.requests, report.accounts)
    };
    assert_eq!(read(&sealed()), (0, 0, 2));
    assert_eq!(read(&with_news()), (2, 0, 2));
    let unsealed = sealed();
    change(&unsealed, |txn| {
        txn.open_table(tables::META).or_fault()?.remove(tables::SEALED).map(drop).or_fault()
    });
    assert_eq!(read(&unsealed), (7, 3, 2));
    unsealed.open();
    assert_eq!(read(&unsealed), (0, 0, 2));
}

/// Changes one row. `T` is its content.
fn edit<T: crate::codec::StoredField>(
    txn: &WriteTransaction,
    table: Definition,
    key: &[u8],
    change: impl FnOnce(&mut T),
) -> StateResult {
    let mut table = txn.open_table(table).or_fault()?;
    let mut row = tables::get(&table, key)?.unwrap();
    change(&mut row);
    tables::put(&mut table, key, &row)
}

fn remove(txn: &WriteTransaction, table: Definition, key: &[u8]) -> StateResult {
    assert!(txn.open_table(table).or_fault()?.remove(key).or_fault()?.is_some());
    Ok(())
}

fn entry(sequence: u64) -> [u8; 8] {
    sequence.to_be_bytes()
}

fn forge(txn: &WriteTransaction, change: impl FnOnce(&mut SealedPosition)) -> StateResult {
    edit(txn, tables::META, tables::SEALED, change)
}

type Plant = fn(&WriteTransaction) -> StateResult;

/// Damage that a start has to find: in what came after the seal, in the seal, and in any account.
const FOUND_AT_START: [(&str, Plant); 10] = [
    ("breaks the chain", |txn| {
        edit(txn, tables::ENTRIES, &entry(9), |row: &mut JournalEntry| row.at = UnixMillis(7))
    }),
    ("does not follow", |txn| remove(txn, tables::ENTRIES, &entry(8))),
    ("the journal ends before", |txn| remove(txn, tables::ENTRIES, &entry(9))),
    ("not where it belongs", |txn| {
        remove(txn, tables::ENTRIES_BY_ACCOUNT, &tables::entry_key(AccountId(id(1)), 9))
    }),
    ("not what it was at the audit before", |txn| remove(txn, tables::ENTRIES, &entry(7))),
    ("not what it was at the audit before", |txn| forge(txn, |seal| seal.head.hash[0] ^= 1)),
    ("not what it was at the audit before", |txn| forge(txn, |seal| seal.head.sequence = 90)),
    ("other balances than its journal", |txn| {
        edit(txn, tables::BALANCES, id(1).as_bytes(), |row: &mut cresset_ledger::Balances| {
            row.premium.debited = Microcredits::ZERO;
        })
    }),
    ("in flight", |txn| {
        edit(txn, tables::ACCOUNTS, id(2).as_bytes(), |row: &mut cresset_ledger::Account| {
            row.in_flight = 1;
        })
    }),
    ("contradicts itself", |txn| {
        let key = tables::request_key(&key(9));
        edit(txn, tables::REQUESTS, &key, |row: &mut RequestRecord| row.attempts[0].usage = None)
    }),
];

#[test]
fn a_start_finds_damage_after_the_seal_and_in_every_account() {
    for (expect, plant) in FOUND_AT_START {
        let fixture = with_news();
        change(&fixture, plant);
        let whole = audit_everything(&fixture).violations;
        // A seal is no record: nothing depends on it but the next start.
        let forged = seal_of(&fixture) != seal_of(&with_news());
        assert_eq!(whole.is_empty(), forged, "{expect}: {whole:?}");
        let why = unusable(fixture.try_open());
        let named = audit_at_start(&fixture).violations;
        assert!(named.iter().any(|found| found.contains(expect)), "{expect:?} among {named:?}");
        assert!(why.contains("breaks its own rules"), "{why}");
    }
}

/// Damage in what was sealed is left to the audit of everything, which finds it, also behind a seal
/// that was forged to cover it.
#[test]
fn the_audit_of_everything_finds_damage_before_the_seal() {
    let plants: [(&str, Plant); 4] = [
        ("breaks the chain", |txn| {
            edit(txn, tables::ENTRIES, &entry(3), |row: &mut JournalEntry| row.hash[0] ^= 1)
        }),
        ("does not follow", |txn| remove(txn, tables::ENTRIES, &entry(3))),
        ("contradicts itself", |txn| {
            let key = tables::request_key(&key(1));
            edit(txn, tables::REQUESTS, &key, |row: &mut RequestRecord| {
                row.attempts[0].charged = BucketAmounts::ZERO;
            })
        }),
        ("does not lead to the balances", |txn| {
            let (mut sequence, mut hash) = (0, [0; 16]);
            edit(txn, tables::ENTRIES, &entry(9), |row: &mut JournalEntry| {
                row.after.premium.debited = Microcredits::ZERO;
                (sequence, hash) = (row.sequence, row.hash);
            })?;
            edit(txn, tables::BALANCES, id(1).as_bytes(), |row: &mut cresset_ledger::Balances| {
                row.premium.debited = Microcredits::ZERO;
            })?;
            forge(txn, |seal| seal.head = JournalHead { sequence, hash })
        }),
    ];
    for (expect, plant) in plants {
        let fixture = with_news();
        change(&fixture, plant);
        assert_eq!(audit_at_start(&fixture).violations, Vec::<String>::new(), "{expect}");
        let store = fixture.open();
        let found = store.audit().unwrap().violations;
        assert!(found.iter().any(|found| found.contains(expect)), "{expect:?} among {found:?}");
        assert!(!store.healthy());
        drop(store);
        // A restart does not make it forget.
        assert_eq!(seal_of(&fixture), None);
        assert!(unusable(fixture.try_open()).contains("breaks its own rules"));
    }
}

/// However often a ledger is opened after a crash: one of its nodes audits everything.
#[test]
fn a_crash_is_owed_an_audit_of_everything() {
    let fixture = with_news();
    assert!(seal_of(&fixture).unwrap().fully_audited_at > UnixMillis(0));
    let (clock, limits) = (Arc::new(fixture.clock.clone()), Limits::default());
    drop(Store::open_briefly(&fixture.config(), clock, limits).unwrap());
    assert_eq!(seal_of(&fixture).unwrap().fully_audited_at, UnixMillis(0));
    let store = fixture.open();
    assert!(store.inner.shared.owes_full_audit(u64::MAX));
    store.audit().unwrap();
    assert!(!store.inner.shared.owes_full_audit(1));
    drop(store);
    assert_eq!(seal_of(&fixture).unwrap().fully_audited_at, fixture.clock.now());
    fixture.clock.set(fixture.clock.now().0 + 10);
    assert!(fixture.open().inner.shared.owes_full_audit(10));
}

/// With one row a second the audit would take many minutes: it waits, and ends when it is told to.
#[test]
fn an_audit_ends_when_the_store_does() {
    let fixture = Fixture::new(u64::from(u32::MAX));
    let store = fixture.open();
    for request in 1..=300 {
        store.submit_blocking(admit(request, request, store.boot(), 1)).unwrap();
        store.submit_blocking(settle(request, request, 1)).unwrap();
    }
    let (turns, stop) = AuditTurns::new(Arc::clone(&store.inner.shared), 1);
    let everything = thread::Builder::new().spawn(move || turns.everything()).unwrap();
    drop(stop);
    everything.join().unwrap();
    assert!(store.healthy());
}

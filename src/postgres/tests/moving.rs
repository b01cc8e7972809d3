//! A ledger of a data folder that is moved into a database is the same there.

use super::cluster;
use super::node::SetClock;
use crate::PostgresConfig;
use crate::audit_source::AuditReading;
use crate::driver::Driver;
use crate::session::Connector;
use cresset_base::{Clock, SystemClock};
use cresset_ledger::JournalEntry;
use cresset_ledger::audit::{AuditProgress, AuditSource, JournalChain};
use cresset_store::testing::random_commands::command;
use cresset_store::testing::*;
use cresset_store::{
    ClockLimits, EmbeddedConfig, LedgerSettings, Limits, MoveHooks, MoveReport, Store, StoreConfig,
    StoreError, StoreResult,
};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

const HOUR: u64 = 3_600_000;

fn open(config: &StoreConfig, clock: &SetClock, accepted: bool) -> Store {
    let clock_limits = ClockLimits { accepted, ..ClockLimits::default() };
    let limits = Limits { clock: clock_limits, ..Limits::default() };
    Store::open(config, Arc::new(clock.clone()), limits).unwrap()
}

fn wait<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
}

/// Admits a request of account 1 and settles it with an answer until this time.
fn answer(store: &Store, number: u128, expires_at: u64) {
    store.submit_blocking(admit(number, number, store.boot(), 10)).unwrap();
    let body = body_of(vec![number as u8; 3_000].into(), expires_at);
    let settled = store.submit_with(settle(number, number, 7), Some((key(number), body)));
    wait(settled).unwrap();
}

/// A folder whose ledger has every kind of row, times that were set back, an input that crashed,
/// and open reservations.
fn full_folder(clock: &SetClock, now: u64) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = StoreConfig::folder(dir.path());
    Store::init(&config).unwrap();
    clock.set(now);
    let store = open(&config, clock, false);
    let opening_of_two =
        BucketAmounts { trial: Microcredits::new(500).unwrap(), ..BucketAmounts::ZERO };
    let two = Command::CreateAccount {
        id: AccountId(id(2)),
        name: "two".into(),
        plan: "basic".into(),
        opening: opening_of_two,
    };
    let application = Command::CreateApplication {
        id: ApplicationId(id(1)),
        account: AccountId(id(1)),
        name: "app".into(),
    };
    let owners = opening(100_000).into_iter().chain([two, application]);
    for command in owners.chain([issue(2, 1, Some(1)), issue(3, 2, None)]) {
        store.submit_blocking(command).unwrap();
    }
    (100..110).for_each(|number| answer(&store, number, now + HOUR));
    answer(&store, 110, now - 1);
    store.submit_blocking(admit(200, 200, store.boot(), 10)).unwrap();
    store.submit_blocking(start(200, 200)).unwrap();
    drop(store);
    clock.set(now - 2 * HOUR);
    let store = open(&config, clock, true);
    let mut runner = TestRunner::deterministic();
    let mut open_one = admit(300, 300, store.boot(), 10);
    store.submit_blocking(open_one.clone()).unwrap();
    for _ in 0..600 {
        let mut command = command().new_tree(&mut runner).unwrap().current();
        if let Command::Admit(admit) = &mut command {
            admit.boot = store.boot();
        }
        match store.submit_blocking(command) {
            Ok(_) | Err(StoreError::Refused(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    open_one = start(300, 300);
    store.submit_blocking(open_one).unwrap();
    dir
}

/// Everything that the ledger tells, but for numbers and hashes of entries.
fn told(store: &Store) -> Vec<String> {
    wait(async {
        let read = store.read().await.unwrap();
        let mut told = Vec::new();
        let mut say = |what: String| told.push(what);
        for account in read.accounts(None, usize::MAX >> 1).await.unwrap() {
            let id = account.id;
            say(format!("{account:?} {:?}", read.balances(id).await.unwrap()));
            let entries = read.entries(id, 0, usize::MAX >> 1).await.unwrap();
            let mut requests = BTreeSet::new();
            for entry in entries {
                requests.extend(entry.reservation().map(|(key, _)| key.request));
                say(format!("{:?}", JournalEntry { sequence: 0, hash: [0; 16], ..entry }));
            }
            for request in requests {
                for record in read.requests_by_id(id, request).await.unwrap() {
                    let crashes = read.crashes(id, &record.fingerprint).await.unwrap();
                    let body = store.stored_body(&record.key).await.unwrap();
                    say(format!("{record:?} {crashes:?} {body:?}"));
                }
            }
        }
        for credential in read.credentials(None, usize::MAX >> 1).await.unwrap() {
            let Credential { digest, budgets, used, expires_at, revoked_at, .. } = &credential;
            say(format!(
                "{credential:?} {digest:?} {budgets:?} {used:?} {expires_at:?} {revoked_at:?}"
            ));
        }
        say(format!("{:?}", read.applications(None, usize::MAX >> 1).await.unwrap()));
        told
    })
}

fn copy_of(folder: &Path) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    copy
}

fn move_with(
    from: &Path,
    to: &PostgresConfig,
    clock: &SetClock,
    configure: &dyn Fn() -> StoreResult,
) -> StoreResult<MoveReport> {
    let progress = |_: &'static str, _: AuditProgress| {};
    let hooks = MoveHooks { progress: &progress, configure };
    let (from, clock) = (EmbeddedConfig::new(from), Arc::new(clock.clone()));
    Store::move_to(&from, to, clock, Limits::default(), &hooks)
}

fn files(folder: &Path) -> BTreeSet<String> {
    let files = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
    files.map(|file| file.file_name().into_string().unwrap()).collect()
}

#[test]
fn a_moved_ledger_tells_the_same() {
    let Some(cluster) = cluster::shared() else { return };
    let (clock, now) = (SetClock::default(), SystemClock.now().0);
    let folder = full_folder(&clock, now);
    let place = cluster.place();
    // An earlier run was interrupted at its end; nothing of it is there.
    let interrupted = || Err(StoreError::Unusable("the disk is full".into()));
    let failed = move_with(folder.path(), &place, &clock, &interrupted);
    assert!(failed.unwrap_err().to_string().contains("the disk is full"));
    // What the folder tells once its open reservations are released.
    clock.set(now);
    let twin = copy_of(folder.path());
    let expect = {
        let store = open(&StoreConfig::folder(twin.path()), &clock, false);
        told(&store)
    };
    let text = expect.join("\n");
    assert!(text.contains("NodeRestarted") && text.contains("Some(Crashes"), "{text}");

    let older = copy_of(folder.path());
    let report = move_with(folder.path(), &place, &clock, &|| Ok(())).unwrap();
    assert_eq!(report.answers, 10, "the eleventh has expired");
    let moved = ["bodies.redb.moved", "ledger.redb.moved", "lock"].map(str::to_owned);
    assert_eq!(files(folder.path()), moved.into());
    assert_eq!(report.files.len(), 2);
    let config = StoreConfig::Database(Arc::new(place.clone()));
    assert_eq!(Store::inspect(&config).unwrap().violations, Vec::<String>::new());
    let store = open(&config, &clock, false);
    for (found, expect) in told(&store).iter().zip(&expect) {
        assert_eq!(found, expect);
    }
    assert_eq!(told(&store).len(), expect.len());
    assert!(store.fully_audited_at().is_some(), "the seal of the move");
    drop(store);
    origin_is_told(&place);

    // There is nothing more to move, and another ledger finds the place taken.
    let again = move_with(folder.path(), &place, &clock, &|| Ok(()));
    assert!(again.unwrap_err().to_string().contains("there is no"));
    let other = move_with(older.path(), &place, &clock, &|| panic!("it was moved"));
    assert!(other.unwrap_err().to_string().contains("has a table"));
    assert!(files(older.path()).contains("ledger.redb"));
}

/// The old chain's end is told, and where the time was set back.
fn origin_is_told(place: &PostgresConfig) {
    let driver = Driver::start().unwrap();
    let connector = Arc::new(Connector::new(place, driver.handle()));
    let reading = AuditReading::begin(&driver, &connector).unwrap();
    let chain = JournalChain::Account(AccountId(id(1)));
    assert_eq!(AuditSource::set_back_after(&reading, chain).unwrap().len(), 1);
    let origin = reading.origin().unwrap().unwrap();
    let heads = AuditSource::heads(&reading).unwrap().map(|head| head.unwrap().1.sequence);
    assert_eq!(origin.head.sequence, heads.sum::<u64>());
}

#[test]
fn a_move_that_ended_before_its_files_were_put_away_is_finished() {
    let Some(cluster) = cluster::shared() else { return };
    let clock = SetClock::default();
    let folder = full_folder(&clock, SystemClock.now().0);
    let place = cluster.place();
    // The folder as it is at the commit.
    let at_commit = std::cell::RefCell::new(None);
    let configure = || {
        at_commit.replace(Some(copy_of(folder.path())));
        Ok(())
    };
    move_with(folder.path(), &place, &clock, &configure).unwrap();
    let left = at_commit.into_inner().unwrap();
    std::fs::rename(left.path().join("bodies.redb"), left.path().join("bodies.redb.moved"))
        .unwrap();
    let finished = move_with(left.path(), &place, &clock, &|| Ok(())).unwrap();
    assert!(finished.rows.is_none());
    assert_eq!(files(left.path()), files(folder.path()));
}

#[test]
fn a_ledger_that_breaks_its_rules_or_a_taken_name_moves_nothing() {
    let Some(cluster) = cluster::shared() else { return };
    let clock = SetClock::default();
    let folder = full_folder(&clock, SystemClock.now().0);
    let place = cluster.place();
    let taken = folder.path().join("bodies.redb.moved");
    std::fs::write(&taken, "of another ledger").unwrap();
    let refused = move_with(folder.path(), &place, &clock, &|| Ok(())).unwrap_err().to_string();
    assert!(refused.contains("from an earlier move"), "{refused}");
    std::fs::remove_file(taken).unwrap();
    let settings = LedgerSettings { standbys: Some(1), ..place.settings.clone() };
    let standby = PostgresConfig { settings, ..place.clone() };
    let refused = move_with(folder.path(), &standby, &clock, &|| Ok(())).unwrap_err().to_string();
    assert!(refused.contains("ledger.standbys is 1"), "{refused}");
    let missing = Store::inspect(&StoreConfig::Database(Arc::new(place))).unwrap_err().to_string();
    assert!(missing.contains("no ledger"), "{missing}");
    assert!(files(folder.path()).contains("ledger.redb"));
}

//! What must not happen to money, whatever the database, another node or a person does.

use super::cluster::{self, Cluster};
use super::node::{Node, SetClock};
use crate::session::DatabaseSession;
use crate::{PostgresBackend, PostgresConfig};
use cresset_base::UnixMillis;
use cresset_ledger::apply::apply;
use cresset_ledger::{AttemptState, RequestRecord, audit};
use cresset_store::testing::*;
use cresset_store::{
    Backend, BatchFailure, LedgerReader, LedgerSettings, LedgerTxn, Store, StoreConfig, StoreError,
    WriteAction,
};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

pub const NOW: UnixMillis = UnixMillis(1_000_000);

pub fn run(
    backend: &PostgresBackend,
    commands: Vec<Command>,
) -> Result<Vec<Outcome>, BatchFailure> {
    let actions: Vec<_> = commands.into_iter().map(WriteAction::from).collect();
    let actions: Vec<_> = actions.iter().collect();
    backend.transact(0, &actions, NOW, |txn| {
        let outcome = |action: &&WriteAction| {
            let now = txn.time_of(&action.command);
            apply(txn, &action.command, now).map_err(|error| format!("{error:?}"))
        };
        Ok(actions.iter().map(outcome).map(Result::unwrap).collect())
    })
}

pub fn record(backend: &PostgresBackend, number: u128) -> RequestRecord {
    let read = async { backend.snapshot().await.unwrap().request(&key(number)).await.unwrap() };
    backend.driver.wait(read).unwrap()
}

pub fn assert_sound(backend: &PostgresBackend) {
    let report = audit::everything(&*backend.audit_source().unwrap(), &audit::unpaced).unwrap();
    assert_eq!(report.violations, Vec::<String>::new());
}

/// A ledger with account 1 and two requests: one settled, one that holds a reservation.
pub fn with_requests(cluster: &Cluster) -> (PostgresConfig, PostgresBackend, BootId) {
    let (place, boot) = (cluster.ledger(), BootId::generate());
    let backend = PostgresBackend::open(&place).unwrap();
    backend.claim(boot).unwrap();
    run(&backend, opening(100)).unwrap();
    run(&backend, vec![admit(1, 1, boot, 10), admit(2, 2, boot, 10)]).unwrap();
    run(&backend, vec![settle(1, 1, 4)]).unwrap();
    (place, backend, boot)
}

#[test]
fn the_database_itself_refuses_what_breaks_a_rule() {
    let Some(cluster) = cluster::shared() else { return };
    let (place, _backend, _) = with_requests(cluster);
    let ends = "insert into entries select account, sequence + 100, kind, attempt, at, row \
                from entries where kind = 2";
    for (what, sql, rule) in [
        ("a second end of an attempt", ends, "one_end"),
        (
            "a second reservation of an attempt",
            "insert into entries select account, sequence + 100, kind, attempt, at, row \
             from entries where kind = 1",
            "one_reserve",
        ),
        (
            "a second entry of one number",
            "insert into entries select account, sequence, 0, null, at, row from entries limit 1",
            "entries_pkey",
        ),
        ("an overdrawn bucket", "update accounts set premium_reserved = 97", "accounts_check1"),
        ("a negative charge", "update accounts set premium_debited = -1", "premium_debited_check"),
        ("fewer than no requests", "update accounts set in_flight = -1", "in_flight_check"),
    ] {
        let refused = cluster.with_session(&place, async |session| session.script(sql).await);
        let said = refused.expect_err(what).to_string();
        assert!(said.contains(rule), "{what}: {said}");
    }
}

#[test]
fn a_damaged_row_is_an_error_of_its_own_command_and_audits_find_it() {
    let Some(cluster) = cluster::shared() else { return };
    let (place, backend, boot) = with_requests(cluster);
    let damage =
        "update requests set row = set_byte(row, 40, get_byte(row, 40) # 1) where state = 0";
    cluster.with_session(&place, async |session| session.script(damage).await.unwrap());
    let actions: Vec<WriteAction> = vec![admit(3, 3, boot, 10).into(), settle(2, 2, 4).into()];
    let actions: Vec<_> = actions.iter().collect();
    let damaged = backend.transact(0, &actions, NOW, |txn| {
        for (index, action) in actions.iter().enumerate() {
            if let Err(error) = apply(txn, &action.command, NOW) {
                let cresset_ledger::apply::ApplyError::State(error) = error else {
                    panic!("{error}")
                };
                return Err(BatchFailure::Damaged(index, error));
            }
        }
        Ok(())
    });
    assert!(matches!(damaged, Err(BatchFailure::Damaged(1, _))), "{damaged:?}");
    run(&backend, vec![admit(3, 3, boot, 10)]).unwrap();
    let report = audit::everything(&*backend.audit_source().unwrap(), &audit::unpaced).unwrap();
    assert!(!report.ok);
}

#[test]
fn two_writers_of_the_same_accounts_lose_and_double_nothing() {
    const PAIRS: u128 = 60;
    let Some(cluster) = cluster::shared() else { return };
    let place = cluster.ledger();
    run(&PostgresBackend::open(&place).unwrap(), opening(1_000_000)).unwrap();
    thread::scope(|scope| {
        for writer in 1..=3_u128 {
            let place = &place;
            scope.spawn(move || {
                let (backend, boot) = (PostgresBackend::open(place).unwrap(), BootId::generate());
                for pair in 0..PAIRS {
                    let number = writer * 1_000 + pair;
                    // Every writer asks for the same requests, too: one of them runs each.
                    let (shared, attempt) = (10_000 + pair, number + 100_000);
                    run(&backend, vec![admit(number, number, boot, 10)]).unwrap();
                    let outcomes = run(
                        &backend,
                        vec![settle(number, number, 3), admit(shared, attempt, boot, 10)],
                    );
                    if let Outcome::Admitted(_) = outcomes.unwrap()[1] {
                        run(&backend, vec![settle(shared, attempt, 2)]).unwrap();
                    }
                }
            });
        }
    });
    let backend = PostgresBackend::open(&place).unwrap();
    assert_sound(&backend);
    let balances = backend.driver.wait(async {
        backend.snapshot().await.unwrap().balances(AccountId(id(1))).await.unwrap()
    });
    let charged = 3 * PAIRS * 3 + PAIRS * 2;
    assert_eq!(u128::from(balances.premium.debited.get()), charged);
    assert_eq!(balances.premium.reserved.get(), 0);
}

#[test]
fn places_that_hold_no_ledger_are_told_apart() {
    let Some(cluster) = cluster::shared() else { return };
    let unusable = |result: Result<PostgresBackend, StoreError>| match result.err() {
        Some(StoreError::Unusable(why)) => why,
        other => panic!("{other:?}"),
    };
    let place = cluster.place();
    let config = StoreConfig::Database(Arc::new(place.clone()));
    assert!(unusable(PostgresBackend::open(&place)).contains("cresset init --ledger"));
    let settings = LedgerSettings { standbys: Some(1), ..place.settings.clone() };
    let waiting = PostgresConfig { settings, ..place.clone() };
    assert!(unusable(PostgresBackend::open(&waiting)).contains("ledger.standbys is 1"));
    Store::init(&config).unwrap();
    let again = Store::init(&config).unwrap_err().to_string();
    assert!(again.contains("has a table"), "{again}");
    let damage = "update meta set row = set_byte(row, 4, 9)";
    cluster.with_session(&place, async |session| session.script(damage).await.unwrap());
    let damaged = PostgresBackend::open(&place).err().map(|error| error.to_string());
    assert!(damaged.unwrap_or_default().contains("wrong checksum"));
    let foreign = "drop table meta; create table meta (name text)";
    cluster.with_session(&place, async |session| session.script(foreign).await.unwrap());
    assert!(unusable(PostgresBackend::open(&place)).contains("not those of a ledger"));
}

/// A commit whose wait for its standby is cancelled reports success, and a failover loses it.
#[test]
fn a_commit_that_reached_no_standby_is_not_acknowledged() {
    let Some(programs) = cluster::programs() else { return };
    let cluster = Cluster::start(&programs);
    let (place, backend, boot) = with_requests(&cluster);
    let standby = async |session: &DatabaseSession, name: &str| {
        session
            .script(&format!("alter system set synchronous_standby_names = '{name}'"))
            .await
            .unwrap();
        session.script("select pg_reload_conf()").await.unwrap();
    };
    let waiting = "select pid from pg_stat_activity where wait_event = 'SyncRep'";
    cluster.with_session(&place, async |session| standby(session, "nobody").await);
    let (done, outcome) = mpsc::sync_channel(1);
    thread::scope(|scope| {
        scope.spawn(|| {
            // The server reads its new settings between two statements.
            thread::sleep(Duration::from_millis(300));
            done.send(run(&backend, vec![admit(3, 3, boot, 10)]).map(drop)).unwrap();
        });
        cluster.with_session(&place, async |session| {
            for _ in 0..3 {
                while session.text(waiting).await.unwrap().is_empty() {
                    thread::sleep(Duration::from_millis(5));
                }
                // All that wait: the writer's commit, and the renewals of its lease.
                let cancel = "select pg_cancel_backend(pid) from pg_stat_activity \
                              where wait_event = 'SyncRep'";
                session.script(cancel).await.unwrap();
                thread::sleep(Duration::from_millis(50));
                assert!(outcome.try_recv().is_err(), "a commit was told that reached no standby");
            }
            standby(session, "").await;
        });
        outcome.recv().unwrap().unwrap();
    });
    assert_eq!(record(&backend, 3).latest().state, AttemptState::Queued);
    assert_sound(&backend);
}

#[test]
fn answers_are_counted_replaced_and_erased() {
    let Some(cluster) = cluster::shared() else { return };
    let clock = SetClock::default();
    clock.set(NOW.0);
    let mut node = Node::open(&cluster.ledger(), &clock);
    let boot = node.store.boot();
    for command in opening(100) {
        node.apply(command.into()).unwrap();
    }
    for number in 1..=3 {
        node.apply(admit(number, number, boot, 10).into()).unwrap();
        let body = body_of(vec![7; 100].into(), NOW.0 + 1_000 * number as u64);
        let command = settle(number, number, 1);
        node.apply(WriteAction::new(command, Some((key(number), body)))).unwrap();
    }
    let bytes = |node: &Node| {
        let backend = &node.backend;
        let read = async { backend.snapshot().await.unwrap().answer_bytes(AccountId(id(1))).await };
        backend.driver.wait(read).unwrap()
    };
    let all = bytes(&node);
    assert!(all > 300);
    clock.set(NOW.0 + 1_000);
    node.sweep();
    assert_eq!(bytes(&node), all / 3 * 2);
    node.assert_sound();
    let erase = |request| node.backend.erase_answers(AccountId(id(1)), request).unwrap();
    assert_eq!(erase(Some(RequestId(id(2)))), 1);
    assert_eq!((erase(None), erase(None)), (1, 0));
    assert_eq!(bytes(&node), 0);
    node.assert_sound();
}

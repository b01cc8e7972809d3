//! Batches of different accounts that are committed at once, each in a lane of its own.

use super::cluster;
use super::faults::NOW;
use super::proxy::Proxy;
use crate::{PostgresBackend, PostgresConfig};
use cresset_base::SystemClock;
use cresset_ledger::AttemptState;
use cresset_ledger::apply::apply;
use cresset_store::testing::*;
use cresset_store::{Backend, LedgerTxn, Limits, Store, StoreConfig, StoreError, WriteAction};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use tokio::runtime::Runtime;

/// As many accounts as there are lanes; the ids of one after the other belong to different ones.
const ACCOUNTS: [u128; 4] = [1, 2, 3, 4];

/// Whether somebody waits for the transaction that asks.
const HAS_WAITER: &str =
    "select 1 from pg_locks where not granted and transactionid = pg_current_xact_id()::xid";

/// A command about account 1 as one about another account, whose key has the account's number.
fn of_account(account: u128, mut command: Command) -> Command {
    match &mut command {
        Command::Admit(admit) => {
            admit.key.account = AccountId(id(account));
            admit.credential = CredentialId(id(account));
        }
        Command::Settle { key, .. } => key.account = AccountId(id(account)),
        Command::CreateAccount { id: named, .. } | Command::Grant { account: named, .. } => {
            *named = AccountId(id(account));
        }
        Command::IssueCredential { .. } => command = issue(account, account, None),
        other => panic!("{other:?}"),
    }
    command
}

/// A store on a new ledger with these accounts.
fn with_accounts(place: &PostgresConfig) -> Store {
    let config = StoreConfig::Database(Arc::new(place.clone()));
    let store = Store::open(&config, Arc::new(SystemClock), Limits::default()).unwrap();
    for account in ACCOUNTS {
        for command in opening(Microcredits::MAX.get()) {
            store.submit_blocking(of_account(account, command)).unwrap();
        }
    }
    store
}

/// Admits and settles a request. An admission that was answered `Unavailable` is released, so it is
/// tried again under another attempt; a settlement is sent until its outcome is known.
fn run(store: &Store, account: u128, request: u128) {
    let submit = |command| store.submit_blocking(of_account(account, command));
    for attempt in request * 1_000.. {
        if is_admitted(&submit(admit(request, attempt, store.boot(), 10))) {
            while let Err(error) = submit(settle(request, attempt, 3)) {
                assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
                thread::sleep(Duration::from_millis(2));
            }
            return;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn an_account_does_not_wait_for_one_of_another_lane() {
    let Some(cluster) = cluster::shared() else { return };
    let place = cluster.ledger();
    let store = with_accounts(&place);
    let waiting = cluster.with_session(&place, async |session| {
        session.script("begin").await.unwrap();
        let held = format!("select 1 from accounts where id = '{}' for update", id(1));
        session.script(&held).await.unwrap();
        let own = store.clone();
        let waiting = thread::spawn(move || run(&own, 1, 10));
        while session.text(HAS_WAITER).await.unwrap().is_empty() {
            thread::sleep(Duration::from_millis(5));
        }
        for (request, account) in (20..).zip(ACCOUNTS).skip(1) {
            run(&store, account, request);
        }
        assert!(!waiting.is_finished());
        session.script("rollback").await.unwrap();
        waiting
    });
    waiting.join().unwrap();
    assert!(store.audit().unwrap().ok);
}

#[test]
fn connections_that_are_cut_while_all_lanes_work_lose_and_double_nothing() {
    let Some(cluster) = cluster::shared() else { return };
    let proxy = Proxy::before(cluster.folder());
    let store = with_accounts(&proxy.place(&cluster.ledger()));
    let over = AtomicBool::new(false);
    let done = thread::scope(|scope| {
        let works = ACCOUNTS.map(|account| {
            let (store, over) = (&store, &over);
            scope.spawn(move || {
                let requests = 1..;
                let wanted = requests.take_while(|_| !over.load(Ordering::Relaxed));
                wanted.map(|request: u128| run(store, account, account * 1_000 + request)).count()
            })
        });
        for portion in 0..10 {
            proxy.cut_after(portion * 7, portion % 2 == 0);
            thread::sleep(Duration::from_millis(60));
            proxy.mend();
            run(&store, 1, u128::from(portion) + 1);
        }
        over.store(true, Ordering::Relaxed);
        works.map(|work| work.join().unwrap())
    });
    Runtime::new().unwrap().block_on(async {
        let read = store.read().await.unwrap();
        for (account, count) in ACCOUNTS.into_iter().zip(done) {
            let more = if account == 1 { 10 } else { 0 };
            assert!(count > 3, "account {account}: {done:?}");
            let premium = read.balances(AccountId(id(account))).await.unwrap().premium;
            let (debited, reserved) = (premium.debited.get(), premium.reserved.get());
            assert_eq!((debited, reserved), (3 * (count as u64 + more), 0), "account {account}");
            for request in 1..=count as u128 {
                let request = RequestId(id(account * 1_000 + request));
                let found = read.requests_by_id(AccountId(id(account)), request).await.unwrap();
                let states: Vec<_> = found.iter().map(|found| found.latest().state).collect();
                assert_eq!(states, [AttemptState::Completed]);
            }
        }
    });
    assert_eq!(store.audit().unwrap().violations, Vec::<String>::new());
}

#[test]
fn a_batch_leaves_out_an_account_that_another_node_has() {
    let Some(cluster) = cluster::shared() else { return };
    let place = cluster.ledger();
    let store = with_accounts(&place);
    let backend = PostgresBackend::open_beside(&place).unwrap();
    let boot = store.boot();
    let commands = [1, 2].map(|account| of_account(account, admit(account, account, boot, 10)));
    let mut actions = commands.map(WriteAction::from);
    let apply_all = |actions: &[WriteAction]| {
        let actions: Vec<_> = actions.iter().collect();
        let put_off = backend.transact(0, &actions, NOW, |txn| {
            let commands = actions.iter().map(|action| &action.command);
            let results = commands.map(|command| {
                let is_put_off = txn.puts_off(command);
                if !is_put_off {
                    assert!(apply(txn, command, txn.time_of(command)).is_ok());
                }
                is_put_off
            });
            Ok(results.collect::<Vec<_>>())
        });
        put_off.unwrap()
    };
    cluster.with_session(&place, async |session| {
        session.script("begin").await.unwrap();
        let held = format!("select 1 from accounts where id = '{}' for update", id(1));
        session.script(&held).await.unwrap();
        assert_eq!(apply_all(&actions), [true, false]);
        actions[0].was_put_off = true;
        thread::scope(|scope| {
            let waiting = scope.spawn(|| apply_all(&actions));
            thread::sleep(Duration::from_millis(100));
            assert!(!waiting.is_finished(), "it is not put off again");
            backend.driver.wait(session.script("rollback")).unwrap();
            assert_eq!(waiting.join().unwrap(), [false, false]);
        });
    });
    let count = Runtime::new()
        .unwrap()
        .block_on(async { store.read().await.unwrap().live_requests().await.unwrap().len() });
    assert_eq!((count, store.audit().unwrap().ok), (2, true));
}

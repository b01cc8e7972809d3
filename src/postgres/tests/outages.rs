//! What happens to a store while its database, the way there, or another node fails.

use super::cluster::{self, Cluster, place_in};
use super::proxy::Proxy;
use super::server_process::ServerProcess;
use crate::PostgresConfig;
use cresset_base::SystemClock;
use cresset_ledger::AttemptState;
use cresset_store::testing::*;
use cresset_store::{Limits, Store, StoreConfig, StoreError};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

fn open(place: &PostgresConfig) -> Store {
    let config = StoreConfig::Database(Arc::new(place.clone()));
    Store::open(&config, Arc::new(SystemClock), Limits::default()).unwrap()
}

/// A store on a new ledger with an account that can pay for everything.
fn with_account(place: &PostgresConfig) -> Store {
    let store = open(place);
    for command in opening(Microcredits::MAX.get()) {
        store.submit_blocking(command).unwrap();
    }
    store
}

/// Sends a command until its outcome is known.
fn until_known(store: &Store, command: &Command) -> Outcome {
    loop {
        match store.submit_blocking(command.clone()) {
            Ok(outcome) => return outcome,
            Err(StoreError::Unavailable(_)) => thread::sleep(Duration::from_millis(5)),
            Err(error) => panic!("{command:?}: {error}"),
        }
    }
}

/// One request from its admission to its end. An admission that was answered `Unavailable` is
/// released, so the request is tried again under another attempt.
fn one(store: &Store, request: u128) {
    let mut attempt = request * 1_000;
    loop {
        attempt += 1;
        match store.submit_blocking(admit(request, attempt, store.boot(), 10)) {
            Ok(Outcome::Admitted(_)) => break,
            Ok(_) | Err(StoreError::Unavailable(_)) => thread::sleep(Duration::from_millis(5)),
            Err(error) => panic!("{error}"),
        }
    }
    // One whose answer was lost finds itself done.
    match until_known(store, &settle(request, attempt, 3)) {
        Outcome::Settled { record, .. } | Outcome::AlreadyResolved(record) => {
            assert_eq!(record.latest().state, AttemptState::Completed, "{record:?}");
        }
        other => panic!("{other:?}"),
    }
}

/// Each of these requests was charged, and nothing is reserved. Returns what was charged in all.
fn assert_all_charged(store: &Store, requests: impl IntoIterator<Item = u128>) -> u64 {
    let runtime = Runtime::new().unwrap();
    let charged = runtime.block_on(async {
        let read = store.read().await.unwrap();
        let mut count = 0;
        for request in requests {
            let record = read.request(&key(request)).await.unwrap();
            let record = record.unwrap_or_else(|| panic!("request {request} is lost"));
            assert_eq!(record.latest().state, AttemptState::Completed, "{record:?}");
            count += 1;
        }
        let premium = read.balances(AccountId(id(1))).await.unwrap().premium;
        assert!(premium.debited.get() >= 3 * count, "{premium:?} after {count} requests");
        assert_eq!(premium.reserved.get(), 0);
        premium.debited.get()
    });
    assert_eq!(store.audit().unwrap().violations, Vec::<String>::new());
    charged
}

/// Cuts the way to the database at each of its first portions of bytes, before and after the
/// portion arrives.
fn cut_everywhere(portions: u32) {
    let Some(cluster) = cluster::shared() else { return };
    let proxy = Proxy::before(cluster.folder());
    let store = with_account(&proxy.place(&cluster.ledger()));
    let cuts = (0..portions).flat_map(|portion| [false, true].map(|arrives| (portion, arrives)));
    let mut requests = 0;
    for (portion, arrives) in cuts {
        proxy.cut_after(portion, arrives);
        requests += 1;
        one(&store, requests);
        proxy.mend();
        requests += 1;
        one(&store, requests);
    }
    assert_eq!(u128::from(assert_all_charged(&store, 1..=requests)), 3 * requests, "each once");
}

#[test]
fn connections_that_are_cut_at_any_message_lose_and_double_nothing() {
    cut_everywhere(12);
}

#[test]
#[ignore = "minutes: many more messages"]
fn connections_that_are_cut_at_hundreds_of_messages_lose_nothing() {
    cut_everywhere(300);
}

/// Kills the primary under load and promotes its synchronous standby, which is all that is left.
fn fail_over() {
    let Some(programs) = cluster::programs() else { return };
    let primary = Cluster::start(&programs);
    let standby = ServerProcess::standby_of(primary.folder(), &programs);
    let place = primary.ledger();
    let wait = "alter system set synchronous_standby_names = '*'";
    primary.with_session(&place, async |session| {
        session.script(wait).await.unwrap();
        session.script("select pg_reload_conf()").await.unwrap();
    });
    let mut both = place.clone();
    both.server.host_path(&standby.folder);
    let store = with_account(&both);
    let acknowledged = Mutex::new(BTreeSet::new());
    let settled = || acknowledged.lock().unwrap().len();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for worker in 1..=4_u128 {
            let (store, acknowledged, stop) = (&store, &acknowledged, &stop);
            scope.spawn(move || {
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let request = worker * 1_000_000 + number;
                    one(store, request);
                    acknowledged.lock().unwrap().insert(request);
                }
            });
        }
        let until = |count: usize| {
            while settled() < count {
                thread::sleep(Duration::from_millis(1));
            }
        };
        until(100);
        drop(primary);
        standby.program(&programs, "pg_ctl", &["promote", "-w", "-D", "data"]);
        until(settled() + 100);
        stop.store(true, Ordering::Relaxed);
    });
    let known = acknowledged.into_inner().unwrap();
    assert_all_charged(&store, known);
}

#[test]
fn a_failover_to_a_synchronous_standby_loses_nothing_acknowledged() {
    fail_over();
}

#[test]
#[ignore = "minutes: many more failovers"]
fn twenty_failovers_lose_nothing_acknowledged() {
    (0..20).for_each(|_| fail_over());
}

/// What `ledger.standbys = 0` accepts: a start and `doctor` warn of it.
#[test]
fn a_failover_to_an_asynchronous_standby_loses_what_no_audit_misses() {
    let Some(programs) = cluster::programs() else { return };
    let primary = Cluster::start(&programs);
    let standby = ServerProcess::standby_of(primary.folder(), &programs);
    let place = primary.ledger();
    let store = with_account(&place);
    (1..=20).for_each(|request| one(&store, request));
    let (asked, at) = ("alter system set primary_conninfo = ''", standby.folder.to_str().unwrap());
    let sql = ["-c", asked, "-c", "select pg_reload_conf()"];
    standby.program(
        &programs,
        "psql",
        &[&["-h", at, "-U", "cresset", "postgres"][..], &sql].concat(),
    );
    let streams = "select 1 from pg_stat_replication";
    primary.with_session(&place, async |session| {
        while !session.text(streams).await.unwrap().is_empty() {
            thread::sleep(Duration::from_millis(10));
        }
    });
    (21..=40).for_each(|request| one(&store, request));
    drop((store, primary));
    standby.program(&programs, "pg_ctl", &["promote", "-w", "-D", "data"]);
    let left = open(&place_in(&standby.folder, place.server.get_options().unwrap()));
    let found = Runtime::new().unwrap().block_on(async {
        let (read, mut found) = (left.read().await.unwrap(), 0);
        for request in 1..=40 {
            found += usize::from(read.request(&key(request)).await.unwrap().is_some());
        }
        found
    });
    assert_eq!(found, 20, "the others were acknowledged, too");
    assert_eq!(left.audit().unwrap().violations, Vec::<String>::new());
}

/// The folder of the socket and the schema of the ledger, for the process that stands still.
const PLACE: &str = "CRESSET_TEST_STALLED_LEDGER";

/// Not a test of its own: the one below starts it with a ledger, and stops it.
#[test]
#[ignore = "only does something with a ledger"]
fn load_until_stopped() {
    let Ok(named) = std::env::var(PLACE) else { return };
    let (folder, options) = named.split_once(' ').unwrap();
    let _armed = cresset_base::failpoint::arm();
    load::without_end(&open(&place_in(&PathBuf::from(folder), options)));
}

/// A node that is stopped inside a transaction, which holds the account of all, holds the others up
/// for as long as the database lets a transaction rest, and is ended.
fn stop_inside_a_transaction() {
    let Some(cluster) = cluster::shared() else { return };
    let place = cluster.ledger();
    let store = with_account(&place);
    let named = format!("{} {}", cluster.folder().display(), place.server.get_options().unwrap());
    let mut child = load::process("tests::outages::load_until_stopped");
    child.env(PLACE, named).env("FAILPOINTS", "store::before_commit=20*off->sleep(600000)");
    let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let boots = || {
        let nodes = Runtime::new().unwrap().block_on(store.nodes()).unwrap();
        nodes.into_iter().filter(|node| node.boot != store.boot().0).map(|node| node.state)
    };
    while boots().next().is_none() {
        thread::sleep(Duration::from_millis(5));
    }
    // Until the child sleeps in the middle of a commit, which then is still under way.
    let resting = "select 1 from pg_stat_activity where state = 'idle in transaction' \
        and state_change < clock_timestamp() - interval '100 ms'";
    cluster.with_session(&place, async |session| {
        while session.text(resting).await.unwrap().is_empty() {
            thread::sleep(Duration::from_millis(5));
        }
    });
    let signal = |name: &str| {
        let kill =
            std::process::Command::new("kill").args([name, &child.id().to_string()]).status();
        assert!(kill.unwrap().success());
    };
    signal("-STOP");
    // It stays stopped, and the others go on all the same.
    let longest = (1..=20).map(|request| {
        let began = Instant::now();
        one(&store, request);
        began.elapsed()
    });
    println!("others were held up for {:.2?} at most", longest.max().unwrap());
    while !boots().any(|state| state == "ended") {
        thread::sleep(Duration::from_millis(5));
    }
    while reserved(&store) > 0 {
        thread::sleep(Duration::from_millis(5));
    }
    assert_all_charged(&store, 1..=20);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_node_that_is_stopped_inside_a_transaction_holds_the_others_up_for_a_moment() {
    stop_inside_a_transaction();
}

#[test]
#[ignore = "minutes: many more stops"]
fn fifty_nodes_that_are_stopped_inside_a_transaction_lose_nothing() {
    (0..50).for_each(|_| stop_inside_a_transaction());
}

fn reserved(store: &Store) -> u64 {
    let read = async { store.read().await.unwrap().balances(AccountId(id(1))).await.unwrap() };
    Runtime::new().unwrap().block_on(read).premium.reserved.get()
}

/// A database that stands still for longer than a lease ends nobody.
#[test]
fn a_database_that_stands_still_ends_no_node() {
    let Some(programs) = cluster::programs() else { return };
    let cluster = Cluster::start(&programs);
    let place = cluster.ledger();
    let stores = [with_account(&place), open(&place), open(&place)];
    let boots = stores.each_ref().map(Store::boot);
    for round in 0..3 {
        cluster.signal("STOP");
        thread::sleep(Duration::from_secs(1));
        cluster.signal("CONT");
        // Long enough for a lease that has run out to be noticed.
        thread::sleep(Duration::from_secs(1));
        for (number, store) in (1_u128..).zip(&stores) {
            one(store, 10 * round + number);
        }
    }
    assert_eq!(stores.each_ref().map(Store::boot), boots, "none began anew");
    assert!(stores.iter().all(|store| !store.was_ended_by_others()));
    assert_all_charged(&stores[0], (0..3).flat_map(|round| (1..=3).map(move |n| 10 * round + n)));
}

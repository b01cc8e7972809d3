//! Kills a process under load again and again on one ledger: no acknowledged command is lost, and
//! every open reservation ends once.

use super::media::Random;
use super::*;
use crate::ledger::AttemptState;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{self, Stdio};

/// Printed by the killed process for each settlement that was acknowledged.
const ACKNOWLEDGED: &str = "acknowledged ";

/// Not a test of its own: the one below starts it in a folder with a ledger, and kills it.
#[test]
#[ignore = "only does something in a folder with a ledger"]
fn load_until_killed() {
    if !Path::new("ledger.redb").exists() {
        return;
    }
    let store = Store::open(
        &StoreConfig::folder("."),
        Arc::new(crate::clock::SystemClock),
        Limits::default(),
    )
    .unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    load(&store);
                }
            });
        }
    });
}

fn load(store: &Store) {
    let request = Uuid::now_v7().as_u128();
    let charge = (request % 10) as u32;
    assert!(is_admitted(&store.submit_blocking(admit(request, request, store.boot(), 10))));
    store.submit_blocking(start(request, request)).unwrap();
    if charge == 0 {
        // The reservation stays open, so the next start has to release it.
        return;
    }
    let answer = (key(request), body_of(answer_to(request), u64::MAX));
    let settled = store.submit_with(settle(request, request, charge), Some(answer));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(settled).unwrap();
    println!("{ACKNOWLEDGED}{request}");
}

fn answer_to(request: u128) -> bytes::Bytes {
    format!("the answer to {request}").into()
}

/// Starts a process under load, waits for `wait` acknowledgements and kills it. Returns every
/// request that it acknowledged.
pub fn run_and_kill(dir: &Path, wait: usize) -> Vec<u128> {
    let name = "store::embedded::tests::kill::load_until_killed";
    let mut child = process::Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--ignored", "--nocapture"])
        .current_dir(dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut acknowledged =
        lines.filter_map(|line| line.ok()?.split_once(ACKNOWLEDGED)?.1.parse().ok());
    let mut known: Vec<u128> = acknowledged.by_ref().take(wait).collect();
    child.kill().unwrap();
    known.extend(acknowledged);
    child.wait().unwrap();
    known
}

fn kill_often(rounds: usize) {
    let fixture = Fixture::new(Microcredits::MAX.get());
    let mut random = Random(5);
    for round in 0..rounds {
        let known = run_and_kill(fixture.dir.path(), 1 + random.below(100));
        assert!(!known.is_empty(), "round {round}: the load did nothing");
        let store = fixture.open();
        assert_sound(&store);
        let read = store.read().now().unwrap();
        for request in known {
            let record =
                read.request(&key(request)).now().unwrap().expect("an acknowledged request");
            assert_eq!(record.latest().state, AttemptState::Completed);
            assert_eq!(u128::from(record.latest().charged.total().get()), request % 10);
            let answer = store.body(&key(request)).now().unwrap();
            assert_eq!(answer, Some(answer_to(request)), "round {round}");
        }
        assert_eq!(read.live_requests().now().unwrap(), [], "round {round}");
        let (_, reserved) = spent(&store);
        assert_eq!(reserved, 0, "round {round}");
    }
}

#[test]
fn a_killed_process_loses_nothing_acknowledged() {
    kill_often(4);
}

#[test]
#[ignore = "minutes: many more kills"]
fn two_hundred_killed_processes_lose_nothing() {
    kill_often(200);
}

//! A process that uses a ledger until it is killed, and tells what was acknowledged to it.

use super::*;
use crate::Store;
use std::io::{BufRead, BufReader};
use std::process::{self, Stdio};

/// Printed by the killed process for each settlement that was acknowledged.
const ACKNOWLEDGED: &str = "acknowledged ";

/// Admits, starts and settles from four threads. A charge is the last digit of its request.
pub fn without_end(store: &Store) {
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    one(store);
                }
            });
        }
    });
}

fn one(store: &Store) {
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

pub fn answer_to(request: u128) -> bytes::Bytes {
    format!("the answer to {request}").into()
}

/// A process of its own that runs this ignored test.
pub fn process(test: &str) -> process::Command {
    let mut child = process::Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--ignored", "--nocapture"]);
    child
}

/// Starts a process under load, waits for `wait` acknowledgements and kills it. Returns every
/// request that it acknowledged.
pub fn kill_after(child: &mut process::Command, wait: usize) -> Vec<u128> {
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut acknowledged =
        lines.filter_map(|line| line.ok()?.split_once(ACKNOWLEDGED)?.1.parse().ok());
    let mut known: Vec<u128> = acknowledged.by_ref().take(wait).collect();
    child.kill().unwrap();
    known.extend(acknowledged);
    child.wait().unwrap();
    known
}

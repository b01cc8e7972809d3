//! Kills a process under load again and again on one ledger: no acknowledged command is lost, and
//! every open reservation ends once.

use super::media::Random;
use super::*;
use crate::testing::load;
use cresset_ledger::AttemptState;
use std::path::Path;

/// Not a test of its own: the one below starts it in a folder with a ledger, and kills it.
#[test]
#[ignore = "only does something in a folder with a ledger"]
fn load_until_killed() {
    if !Path::new("ledger.redb").exists() {
        return;
    }
    let store = Store::open(
        &StoreConfig::folder("."),
        Arc::new(cresset_base::SystemClock),
        Limits::default(),
    )
    .unwrap();
    load::without_end(&store);
}

/// Starts a process under load, waits for `wait` acknowledgements and kills it. Returns every
/// request that it acknowledged.
pub fn run_and_kill(dir: &Path, wait: usize) -> Vec<u128> {
    let name = "embedded::tests::kill::load_until_killed";
    let mut child = load::process(name);
    load::kill_after(child.current_dir(dir), wait)
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
            assert_eq!(answer, Some(load::answer_to(request)), "round {round}");
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

//! Disks that fail, fill up, are slow or were tampered with.

use super::faults::{Bench, opened};
use super::media::{Operation, Random, SimulatedDisk, Trap};
use super::*;
use crate::limits::Limits;
use crate::queue::{MAX_WAITING, WriteJob};
use cresset_ledger::AttemptState;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Lines, Write};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::{self, Child, ChildStdout, Stdio};
use tokio::sync::oneshot;

/// The disk fails at every change in turn: pending ends are written once it works again.
#[test]
fn a_failing_disk_delays_settlements_and_loses_none() {
    let survives = |failing_at| {
        let (disk, _, mut bench) = opened(100);
        let boot = bench.shared.boot();
        bench.apply(vec![admit(1, 1, boot, 10), admit(2, 2, boot, 10)]);
        disk.fail_after(failing_at);
        bench.detach(vec![settle(1, 1, 4), release(2, 2)]);
        if !disk.is_broken() {
            return false;
        }
        assert!(!bench.shared.health.reachable());
        disk.mend();
        bench.reconnect();
        assert_eq!(bench.state(1), Some(AttemptState::Completed), "{failing_at}");
        assert_eq!(bench.state(2), Some(AttemptState::Failed), "{failing_at}");
        bench.assert_balanced(4, failing_at);
        true
    };
    let failures = (0..1_000).take_while(|&at| survives(at)).count();
    assert!(failures > 5, "the disk was hardly made to fail");
}

#[test]
fn a_full_disk_still_serves_reads() {
    let (disk, _, mut bench) = opened(100);
    let boot = bench.shared.boot();
    bench.apply(vec![admit(1, 1, boot, 10)]);
    disk.set_full(true);
    bench.detach(vec![settle(1, 1, 4)]);
    bench.try_reconnect();
    assert!(!bench.shared.health.reachable());
    assert_eq!(bench.state(1), Some(AttemptState::Queued));
    disk.set_full(false);
    bench.reconnect();
    assert_eq!(bench.state(1), Some(AttemptState::Completed));
    bench.assert_balanced(4, 0);
}

/// The disk fails while callers wait. They are told that the outcome is unknown, and a repeat ends
/// the attempt once.
#[test]
fn an_unknown_outcome_may_be_asked_for_again() {
    let survives = |failing_at| {
        let (disk, _, mut bench) = opened(100);
        let boot = bench.shared.boot();
        bench.apply(vec![admit(1, 1, boot, 10)]);
        disk.fail_after(failing_at);
        let answers = bench.apply(vec![settle(1, 1, 4), admit(2, 2, boot, 50)]);
        if !disk.is_broken() {
            assert!(answers.iter().all(|answer| matches!(answer, Some(Ok(_)))));
            return false;
        }
        let unknown = |answer: &_| matches!(answer, Some(Err(StoreError::Unavailable(_))));
        assert!(answers.iter().all(unknown), "{answers:?}");
        disk.mend();
        bench.reconnect();
        assert_ne!(
            bench.state(2),
            Some(AttemptState::Queued),
            "an admission nobody knows of is released"
        );
        let again = bench.apply(vec![settle(1, 1, 4)]).remove(0).unwrap();
        let Ok(Outcome::Settled { record, .. } | Outcome::AlreadyResolved(record)) = again else {
            panic!("{failing_at}: {again:?}");
        };
        assert_eq!(record.latest().state, AttemptState::Completed);
        bench.assert_balanced(4, failing_at);
        true
    };
    let failures = (0..1_000).take_while(|&at| survives(at)).count();
    assert!(failures > 5, "the disk was hardly made to fail");
}

/// Every write or sync fails in turn, once or for good, in the middle of a batch of everything
/// there is. Acknowledged commands stay, the others are resolved by their keys, and no
/// reservation is left open.
fn fail_each(operation: Operation, kind: ErrorKind, breaks: bool) -> usize {
    let survives = |after| {
        let context = format!("{operation:?} {after}, {kind}, for good: {breaks}");
        let (disk, _, mut bench) = opened(100);
        let boot = bench.shared.boot();
        bench.apply(vec![admit(1, 1, boot, 10), admit(2, 2, boot, 10)]);
        disk.set(Trap { operation: Some(operation), after, kind, breaks });
        let answers = bench.apply(vec![settle(1, 1, 4), admit(3, 3, boot, 10), release(2, 2)]);
        let failed = disk.has_failed();
        let reachable = bench.shared.health.reachable();
        assert_eq!(
            answers.iter().all(|answer| matches!(answer, Some(Ok(_)))),
            reachable,
            "{context}: {answers:?}"
        );
        assert_eq!(reachable, !failed, "{context}");
        if kind == ErrorKind::StorageFull {
            assert!(bench.state(1).is_some(), "{context}: reads go on");
        }
        disk.mend();
        bench.reconnect();
        bench.detach(vec![settle(1, 1, 4), release(2, 2)]);
        let admitted = matches!(&answers[1], Some(outcome) if is_admitted(outcome));
        assert_eq!(bench.state(3) == Some(AttemptState::Queued), admitted, "{context}");
        bench.detach(vec![release(3, 3)]);
        bench.assert_balanced(4, after);
        // Everything must be on the disk, not in memory alone.
        bench.reopen().assert_balanced(4, after);
        failed
    };
    (0..10_000).take_while(|&after| survives(after)).count()
}

#[test]
fn any_operation_may_fail() {
    for kind in [ErrorKind::StorageFull, ErrorKind::Other] {
        for breaks in [false, true] {
            assert!(fail_each(Operation::Write, kind, breaks) > 3, "{kind}");
            assert!(fail_each(Operation::Sync, kind, breaks) > 0, "{kind}");
        }
    }
}

#[test]
fn any_read_may_fail() {
    for breaks in [false, true] {
        let survives = |after| {
            let disk = SimulatedDisk::formatted().uncached();
            let clock = TestClock::at(1_000_000);
            let mut bench = Bench::open(&disk, &clock).unwrap();
            bench.detach(opening(100));
            let boot = bench.shared.boot();
            bench.apply(vec![admit(1, 1, boot, 10)]);
            disk.set(Trap {
                operation: Some(Operation::Read),
                after,
                kind: ErrorKind::Other,
                breaks,
            });
            bench.detach(vec![settle(1, 1, 4)]);
            let failed = disk.has_failed();
            disk.mend();
            bench.reconnect();
            assert_eq!(bench.state(1), Some(AttemptState::Completed), "{after}");
            bench.assert_balanced(4, after);
            failed
        };
        let failures = (0..10_000).take_while(|&after| survives(after)).count();
        assert!(failures > 3, "the disk was hardly read");
    }
}

/// A sync takes long: a bounded number of commands waits, the rest are refused at once, and ends of
/// attempts are accepted.
#[test]
fn a_slow_disk_bounds_what_waits() {
    let disk = SimulatedDisk::formatted();
    let store = disk.store(100);
    let boot = store.boot();
    store.submit_blocking(admit(1, 1, boot, 10)).unwrap();
    disk.set_slow(true);
    let push = |command: Command| {
        let (reply, answer) = oneshot::channel();
        store.inner.shared.queue.push(WriteJob::new(command.into(), Some(reply)));
        answer
    };
    // Some of these are in the batch that waits for the disk; the rest fill the queue.
    let mut waiting: Vec<_> = (0..3 * MAX_WAITING).map(|_| push(admit(2, 2, boot, 10))).collect();
    let refused = |answer: &mut oneshot::Receiver<_>| {
        matches!(answer.try_recv(), Ok(Err(StoreError::Overloaded)))
    };
    let turned_away = waiting.iter_mut().filter_map(|answer| refused(answer).then_some(())).count();
    assert!(turned_away > MAX_WAITING, "{turned_away}");
    let owed = push(settle(1, 1, 4));
    disk.set_slow(false);
    assert!(matches!(owed.blocking_recv(), Ok(Ok(Outcome::Settled { .. }))));
    store.submit_blocking(release(2, 2)).unwrap();
    assert_eq!(spent(&store), (4, 0));
    assert_sound(&store);
}

const ANSWER: &[u8] = b"the answer";

/// A ledger whose request 1 was settled and has an answer, after an orderly stop.
fn answered() -> Fixture {
    let fixture = Fixture::new(100);
    let store = fixture.open();
    store.submit_blocking(admit(1, 1, store.boot(), 10)).unwrap();
    keep_answer(&store, 1, &bytes::Bytes::from_static(ANSWER));
    store.submit_blocking(settle(1, 1, 7)).unwrap();
    drop(store);
    fixture
}

/// Flips bits at the given places of either file after an orderly stop: each flip is found, or
/// changes nothing.
fn flip(places: impl Fn(&[u8]) -> Vec<(usize, u8)>) {
    let fixture = answered();
    flip_in(&image(&fixture), &File::ALL, places);
}

/// Flips bits in the file of answers after a kill: nothing else was checked before the start.
fn flip_after_kill(places: impl Fn(&[u8]) -> Vec<(usize, u8)>) {
    let fixture = answered();
    let store = fixture.open();
    keep_answer(&store, 2, &bytes::Bytes::from_static(b"another answer"));
    let killed = image(&fixture);
    drop(store);
    flip_in(&killed, &[File::Bodies], places);
}

/// Flips bits of these files of a ledger and opens it each time.
fn flip_in(sound: &Fixture, files: &[File], places: impl Fn(&[u8]) -> Vec<(usize, u8)>) {
    let fixture = image(sound);
    let mut looker = Looker::start(fixture.dir.path());
    let mut noticed = 0;
    for &file in files {
        let bytes = fs::read(sound.dir.path().join(file.name())).unwrap();
        for (place, bit) in places(&bytes) {
            for restored in File::ALL {
                let name = restored.name();
                fs::copy(sound.dir.path().join(name), fixture.dir.path().join(name)).unwrap();
            }
            let mut bytes = bytes.clone();
            bytes[place] ^= bit;
            fs::write(fixture.dir.path().join(file.name()), &bytes).unwrap();
            let told = looker.told_in_the_end(place % 2 == 0);
            assert!([NOTICED, HARMLESS].contains(&&*told), "{file:?} {place}: {told}");
            noticed += usize::from(told == NOTICED);
        }
    }
    assert!(noticed > 0, "no flip was ever noticed");
}

const NOTICED: &str = "noticed";
const HARMLESS: &str = "harmless";
/// Before what a process tells of a damaged ledger.
const TOLD: &str = "told: ";

/// A process that opens a damaged ledger whenever it is told to. The database panics on some damage
/// while it unwinds from a panic, which ends the process.
struct Looker {
    dir: PathBuf,
    child: Child,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Looker {
    fn start(dir: &Path) -> Self {
        let name = "embedded::tests::disk::look_when_told";
        let mut child = process::Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--ignored", "--nocapture"])
            .current_dir(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { dir: dir.into(), child, answers }
    }

    /// What the process tells; `None` when it ends instead.
    fn told(&mut self, briefly: bool) -> Option<String> {
        writeln!(self.child.stdin.as_mut().unwrap(), "{briefly}").unwrap();
        self.answers.find_map(|line| Some(line.ok()?.split_once(TOLD)?.1.to_owned()))
    }

    /// What is told at last, by the third process if the damage ends the first two.
    fn told_in_the_end(&mut self, briefly: bool) -> String {
        for _ in 0..2 {
            if let Some(told) = self.told(briefly) {
                return told;
            }
            self.child.wait().unwrap();
            *self = Self::start(&self.dir.clone());
        }
        self.told(briefly).unwrap_or_else(|| "each process ends".into())
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        // Without its input the process ends by itself.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Not a test of its own: the process of a `Looker`.
#[test]
#[ignore = "only does something in a folder with a ledger"]
fn look_when_told() {
    if !Path::new(File::Ledger.name()).exists() {
        return;
    }
    for briefly in std::io::stdin().lines() {
        println!("{TOLD}{}", look(briefly.unwrap() == "true"));
    }
}

/// Opens the ledger of `answered` in this folder, reads it, audits it and closes it.
fn look(briefly: bool) -> String {
    let open = if briefly { Store::open_briefly } else { Store::open };
    let clock = Arc::new(TestClock::at(1_000_000));
    let store = match open(&StoreConfig::folder("."), clock, Limits::default()) {
        Ok(store) => store,
        Err(StoreError::Unusable(_) | StoreError::Unavailable(_)) => return NOTICED.into(),
        Err(other) => return other.to_string(),
    };
    if spent(&store) != (7, 0) {
        return format!("spent and reserved: {:?}", spent(&store));
    }
    // The pages of the bodies were not checked, and the database panics on some that are damaged.
    let read = || (store.body(&key(1)).now(), store.audit());
    let Ok((Ok(found), report)) = panic::catch_unwind(AssertUnwindSafe(read)) else {
        return NOTICED.into();
    };
    let sound = report.is_ok_and(|report| report.ok);
    match found {
        Some(found) if found != ANSWER => format!("another answer: {found:?}"),
        None if sound => "the answer is missing, and the audit finds nothing".into(),
        _ if !sound => NOTICED.into(),
        _ if !store.healthy() => "the audit finds nothing, and the ledger is not trusted".into(),
        _ => HARMLESS.into(),
    }
}

/// Some places and bits. Half of them hit what looks like content: most of a small file is filler.
fn some(bytes: &[u8]) -> Vec<(usize, u8)> {
    let mut random = Random(1);
    let mut place = |round| loop {
        let place = random.below(bytes.len());
        if round % 2 == 0 || !matches!(bytes[place], 0 | 255) {
            break (place, 1 << random.below(8));
        }
    };
    (0..40).map(&mut place).collect()
}

/// Every page and every byte of content.
fn all(bytes: &[u8]) -> Vec<(usize, u8)> {
    let told = |(place, byte): (usize, &u8)| place % 512 == 0 || !matches!(byte, 0 | 255);
    let places = bytes.iter().enumerate().filter(|&place| told(place));
    places.map(|(place, _)| (place, 1 << (place % 8))).collect()
}

#[test]
fn a_flipped_bit_is_noticed_or_harmless() {
    flip(some);
    flip_after_kill(some);
}

#[test]
#[ignore = "many minutes: every page and every byte of content of both files"]
fn every_flipped_byte_is_noticed_or_harmless() {
    flip(all);
    flip_after_kill(all);
}

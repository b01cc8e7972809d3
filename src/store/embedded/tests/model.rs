//! Applies the same random commands to memory and to redb, with restarts, losses of power, failing
//! disks and restored backups in between. Answers and rows must be equal.

use super::super::tables;
use super::faults::Bench;
use super::media::{Random, SimulatedDisk};
use super::*;
use crate::RequestSettings;
use crate::backend::Backend;
use crate::testing::random_commands::{CRASH_BLOCK_MS, REPLAY_MS, command};
use cresset_ledger::apply::{ApplyError, apply};
use cresset_ledger::audit::{self, AuditSource, JournalChain, JournalHeads, RowIter};
use cresset_ledger::testing::MemoryState;
use cresset_ledger::{BucketAmounts, JournalHead, RequestRecord};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Step {
    Apply(Command),
    Pass {
        hours: u64,
    },
    /// The clock is set back, which an operator accepts with the next start.
    SetBack {
        hours: u64,
    },
    Reopen,
    PowerLoss {
        seed: u64,
    },
    /// The disk fails at this change of the command, or not at all when it makes fewer.
    IoError {
        after: u64,
        command: Command,
    },
    Backup,
    /// Restores the last backup.
    Restore,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => command().prop_map(Step::Apply),
        1 => (0..30_u64).prop_map(|hours| Step::Pass { hours }),
        1 => (0..90 * 24_u64).prop_map(|hours| Step::Pass { hours }),
        2 => (0..90 * 24_u64).prop_map(|hours| Step::SetBack { hours }),
        1 => Just(Step::Reopen),
        1 => any::<u64>().prop_map(|seed| Step::PowerLoss { seed }),
        2 => (0..30_u64, command()).prop_map(|(after, command)| Step::IoError { after, command }),
        1 => Just(Step::Backup),
        1 => Just(Step::Restore),
    ]
}

/// The first and the earliest time, milliseconds since 1970.
const BEGIN: u64 = 1_000_000;

/// Both implementations, side by side.
struct Pair {
    memory: MemoryState,
    bench: Bench,
    disk: SimulatedDisk,
    clock: TestClock,
    now: u64,
    backup: Option<(TempDir, MemoryState)>,
}

impl Pair {
    fn new() -> Self {
        let clock = TestClock::at(BEGIN);
        let disk = SimulatedDisk::formatted();
        let bench = Bench::open(&disk, &clock).unwrap();
        let mut pair =
            Self { memory: MemoryState::default(), bench, disk, clock, now: BEGIN, backup: None };
        let create = |number| Command::CreateAccount {
            id: AccountId(id(number)),
            name: "name".into(),
            plan: "plan".into(),
            opening: BucketAmounts::ZERO,
        };
        let application = Command::CreateApplication {
            id: ApplicationId(id(1)),
            account: AccountId(id(1)),
            name: "app".into(),
        };
        let credentials = [issue(1, 1, None), issue(2, 1, Some(1)), issue(3, 2, None)];
        for command in [create(1), create(2), application].into_iter().chain(credentials) {
            pair.apply(command);
        }
        pair
    }

    fn take(mut self, step: Step) -> Self {
        match step {
            Step::Apply(command) => self.apply(command),
            Step::Pass { hours } => self.pass(hours * 3_600_000),
            Step::SetBack { hours } => self = self.set_back(hours * 3_600_000),
            Step::Reopen => {
                self.bench = self.bench.reopen();
                self.recover();
            }
            Step::PowerLoss { seed } => self = self.lose_power(seed),
            Step::IoError { after, command } => self.fail(after, command),
            Step::Backup => {
                let dir = tempfile::tempdir().unwrap();
                let snapshot = self.bench.backend.view().unwrap();
                let (scope, to) = (BackupScope::Node(Vec::new()), dir.path().join("backup"));
                super::super::backup::write(&snapshot, &scope, &to).unwrap();
                self.backup = Some((dir, self.memory.clone()));
            }
            Step::Restore => self = self.restore(),
        }
        self
    }

    /// Nothing happens while an attempt is open.
    fn set_back(mut self, milliseconds: u64) -> Self {
        if !self.memory.reservations.is_empty() {
            return self;
        }
        self.now = self.now.saturating_sub(milliseconds).max(BEGIN);
        self.clock.set(self.now);
        let now = UnixMillis(self.now);
        if now < self.bench.backend.stored_time().unwrap() {
            self.memory.set_time_back();
        }
        self.bench.backend.set_time(now).unwrap();
        self.bench = self.bench.reopen();
        self
    }

    fn recover(&mut self) {
        let boot = self.bench.shared.boot();
        let limit = usize::MAX - 1;
        let recover = Command::Recover { boot, limit, crash_block_ms: CRASH_BLOCK_MS };
        apply(&mut self.memory, &recover, UnixMillis(self.now)).unwrap();
    }

    /// Everything so far was acknowledged, so nothing of it may be gone.
    fn lose_power(self, seed: u64) -> Self {
        let Self { memory, bench, disk, clock, now, backup } = self;
        // Anything that closing writes does not reach the disk.
        disk.fail_after(0);
        drop(bench);
        disk.lose_power(&mut Random(seed));
        let bench = Bench::open(&disk, &clock).unwrap();
        let mut pair = Self { memory, bench, disk, clock, now, backup };
        pair.recover();
        pair
    }

    fn restore(self) -> Self {
        let Some((dir, memory)) = &self.backup else {
            return self;
        };
        let memory = memory.clone();
        let (config, from) = (StoreConfig::folder(dir.path()), dir.path().join("backup"));
        Store::restore(&config, &from, RestoreScope::Node).unwrap();
        let Self { bench, disk, clock, now, backup, .. } = self;
        drop(bench);
        disk.load(backup.as_ref().unwrap().0.path());
        let bench = Bench::open(&disk, &clock).unwrap();
        // The backup may have a later time than the clock, which was set back since.
        let now = now.max(bench.backend.stored_time().unwrap().0);
        clock.set(now);
        let mut pair = Self { memory, bench, disk, clock, now, backup };
        pair.recover();
        pair
    }

    /// Either the command happened or it did not; an admission whose answer was lost is released.
    fn fail(&mut self, after: u64, mut command: Command) {
        self.address(&mut command);
        if let Command::Admit(admit) = &mut command {
            // Attempts are never made twice, and this one may leave no row that tells of it.
            admit.attempt = AttemptId(id(1_000 + self.memory.entries.len() as u128));
        }
        let Some((done, answer)) = self.expect(&command) else {
            return;
        };
        self.disk.fail_after(after);
        let found = self.bench.apply(vec![command.clone()]).remove(0).unwrap();
        let failed = self.disk.is_broken();
        self.disk.mend();
        if !failed {
            assert_eq!(
                format!("{:?}", found.map_err(|error| error.to_string())),
                answer,
                "{command:?}"
            );
            self.memory = done;
            return;
        }
        assert!(matches!(found, Err(StoreError::Unavailable(_))), "{found:?}");
        self.bench.reconnect();
        let mut possible = [done, self.memory.clone()];
        if let Command::Admit(admit) = &command {
            let cause = ReleaseCause::TurnedAway(FailureCode::ControlPlaneUnavailable);
            let release = Command::Release { key: admit.key, attempt: admit.attempt, cause };
            // The release is refused if there is nothing to release.
            for memory in &mut possible {
                drop(apply(memory, &release, UnixMillis(self.now)));
            }
        }
        let found = self.stored();
        let place = possible.iter().position(|memory| *memory == found);
        self.memory = possible
            [place.unwrap_or_else(|| panic!("neither done nor undone: {command:?}"))]
        .clone();
    }

    /// Gives an admission the boot that runs now. An id that was forgotten gets an attempt that was
    /// not made before.
    fn address(&self, command: &mut Command) {
        let Command::Admit(admit) = command else { return };
        admit.boot = self.bench.shared.boot();
        let MemoryState { requests, archived, entries, .. } = &self.memory;
        let is_known = requests.contains_key(&admit.key) || archived.contains_key(&admit.key);
        let mut attempts = entries.iter().filter_map(|entry| Some(entry.reservation()?.1));
        if !is_known && attempts.any(|attempt| attempt == admit.attempt) {
            admit.attempt = AttemptId(id(1_000 + entries.len() as u128));
        }
    }

    /// The state after the command and its answer as text. `None` for a charge above the
    /// reservation: that is a violation, after which no request is admitted, and is not compared
    /// here.
    fn expect(&self, command: &Command) -> Option<(MemoryState, String)> {
        let mut memory = self.memory.clone();
        let answer = apply(&mut memory, command, UnixMillis(self.now));
        if matches!(answer, Err(ApplyError::Violated(_))) {
            return None;
        }
        Some((memory, format!("{:?}", answer.map_err(|error| error.to_string()))))
    }

    fn apply(&mut self, mut command: Command) {
        self.address(&mut command);
        let Some((memory, answer)) = self.expect(&command) else {
            return;
        };
        let found = self.bench.apply(vec![command.clone()]).remove(0).unwrap();
        assert_eq!(
            format!("{:?}", found.map_err(|error| error.to_string())),
            answer,
            "{command:?}"
        );
        self.memory = memory;
    }

    fn pass(&mut self, milliseconds: u64) {
        self.now += milliseconds;
        self.clock.set(self.now);
        self.bench.sweep();
        let ended_before = |record: &RequestRecord, milliseconds| {
            let at = record.latest().finished_at;
            at.is_some_and(|at| at.0 + milliseconds <= self.now)
        };
        let is_old = |record: &RequestRecord| ended_before(record, REPLAY_MS);
        let tombstone_ms = RequestSettings::default().tombstone_ms();
        self.memory.archived.retain(|_, record| !ended_before(record, tombstone_ms));
        let now = UnixMillis(self.now);
        self.memory.crashes.retain(|_, crashes| crashes.count_at(now, CRASH_BLOCK_MS));
        let old: Vec<_> =
            self.memory.requests.values().filter(|record| is_old(record)).cloned().collect();
        for record in old {
            self.memory.requests.remove(&record.key);
            self.memory.archived.insert(record.key, record);
        }
    }

    fn compare(&self) {
        let stored = self.stored();
        assert_eq!(stored, self.memory);
        let snapshot = self.bench.backend.view().unwrap();
        let everything = |source: &dyn AuditSource| audit::everything(source, &audit::unpaced);
        for report in [everything(&self.memory), everything(&snapshot)] {
            assert_eq!(report.unwrap().violations, Vec::<String>::new());
        }
        let middle = self.memory.entries.len() / 2;
        if let Some(entry) = middle.checked_sub(1).map(|last| &self.memory.entries[last]) {
            let trusted = JournalHead { sequence: entry.sequence, hash: entry.hash };
            assert_eq!(
                audit::since(&snapshot, trusted.into(), &audit::unpaced).unwrap().violations,
                Vec::<String>::new()
            );
        }
    }

    /// Returns everything on the disk.
    fn stored(&self) -> MemoryState {
        let snapshot = self.bench.backend.view().unwrap();
        let mut crashes = BTreeMap::new();
        for row in tables::under(&snapshot.table(tables::CRASHES).unwrap(), b"").unwrap() {
            let (key, count) = row.unwrap();
            let account = AccountId(Uuid::from_slice(&key[..16]).unwrap());
            crashes.insert((account, key[16..].try_into().unwrap()), count);
        }
        let mut set_back = snapshot.set_back_after(JournalChain::Shared).unwrap();
        // Before the first entry there is nothing to go back from.
        set_back.retain(|last| *last > 0);
        let archived = tables::under(&snapshot.archive().unwrap(), b"").unwrap();
        let requests = tables::under(&snapshot.table(tables::REQUESTS).unwrap(), b"").unwrap();
        let by_key = |row: Result<(_, RequestRecord), _>| {
            row.map(|(_, record)| (record.key, record)).unwrap()
        };
        MemoryState {
            accounts: keyed(AuditSource::accounts(&snapshot), |row| row.id),
            balances: AuditSource::all_balances(&snapshot).unwrap().map(Result::unwrap).collect(),
            applications: keyed(AuditSource::applications(&snapshot), |row| row.id),
            credentials: keyed(AuditSource::credentials(&snapshot), |row| row.id),
            granted: AuditSource::grants(&snapshot)
                .unwrap()
                .map(|row| {
                    row.map(|(account, reference, granted)| ((account, reference), granted))
                        .unwrap()
                })
                .collect(),
            requests: requests.map(by_key).collect(),
            archived: archived.map(by_key).collect(),
            reservations: keyed(AuditSource::reservations(&snapshot), |row| row.key),
            crashes,
            chain_per_account: false,
            set_back: set_back.into_iter().map(|last| (JournalChain::Shared, last)).collect(),
            entries: AuditSource::entries(&snapshot, &JournalHeads::default())
                .unwrap()
                .map(Result::unwrap)
                .collect(),
        }
    }
}

fn keyed<K: Ord, T>(rows: RowIter<'_, T>, key: impl Fn(&T) -> K) -> BTreeMap<K, T> {
    rows.unwrap().map(Result::unwrap).map(|row| (key(&row), row)).collect()
}

fn agree(cases: u32, longest: usize) {
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let steps = proptest::collection::vec(step(), 1..longest);
    let run = |steps: Vec<Step>| {
        steps.into_iter().fold(Pair::new(), Pair::take).compare();
        Ok(())
    };
    TestRunner::new(config).run(&steps, run).unwrap();
}

#[test]
fn memory_and_disk_agree() {
    agree(32, 80);
}

#[test]
#[ignore = "minutes: many more and longer sequences"]
fn memory_and_disk_agree_for_long() {
    agree(1_000, 200);
}

//! Applies the same random commands to memory and to a database, with restarts, kills and
//! connections that are cut at any message in between. Answers and rows must be equal.

use super::cluster;
use super::node::{Node, SetClock};
use super::proxy::Proxy;
use crate::audit_source::AuditReading;
use crate::keys::{InputKey, credential_named};
use crate::rows::{content, fixed};
use cresset_base::UnixMillis;
use cresset_ledger::apply::{ApplyError, apply};
use cresset_ledger::audit::{AuditSource, JournalHeads, RowIter};
use cresset_ledger::testing::MemoryState;
use cresset_ledger::{BucketAmounts, Crashes, RequestRecord};
use cresset_store::rows::crash_key;
use cresset_store::testing::random_commands::{CRASH_BLOCK_MS, command};
use cresset_store::testing::*;
use cresset_store::{RequestSettings, StoreError};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Step {
    Apply(Command),
    Pass {
        hours: u64,
    },
    /// The clock is set back while no node runs.
    SetBack {
        hours: u64,
    },
    Reopen,
    Kill,
    /// Connections are cut at this portion of the command, before or after it arrives.
    Cut {
        portions: u32,
        arrives: bool,
        command: Command,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => command().prop_map(Step::Apply),
        1 => (0..30_u64).prop_map(|hours| Step::Pass { hours }),
        1 => (0..90 * 24_u64).prop_map(|hours| Step::Pass { hours }),
        1 => (0..90 * 24_u64).prop_map(|hours| Step::SetBack { hours }),
        1 => Just(Step::Reopen),
        1 => Just(Step::Kill),
        3 => (0..8_u32, any::<bool>(), command())
            .prop_map(|(portions, arrives, command)| Step::Cut { portions, arrives, command }),
    ]
}

/// The first and the earliest time, milliseconds since 1970.
const BEGIN: u64 = 1_000_000;

/// Both implementations, side by side.
struct Pair {
    memory: MemoryState,
    node: Node,
    proxy: Proxy,
    clock: SetClock,
    now: u64,
}

impl Pair {
    fn new(cluster: &cluster::Cluster) -> Self {
        let (clock, now) = (SetClock::default(), BEGIN);
        clock.set(now);
        let proxy = Proxy::before(cluster.folder());
        let node = Node::open(&proxy.place(&cluster.ledger()), &clock);
        let memory = MemoryState { chain_per_account: true, ..MemoryState::default() };
        let mut pair = Self { memory, node, proxy, clock, now };
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
            Step::SetBack { hours } => {
                self.now = self.now.saturating_sub(hours * 3_600_000).max(BEGIN);
                self.clock.set(self.now);
                self = self.take(Step::Reopen);
            }
            Step::Reopen => {
                self.node = self.node.reopen();
                self.recover();
            }
            Step::Kill => {
                self.node = self.node.kill();
                self.recover();
            }
            Step::Cut { portions, arrives, command } => self.cut(portions, arrives, command),
        }
        self
    }

    fn recover(&mut self) {
        let boot = self.node.store.boot();
        let limit = usize::MAX - 1;
        let recover = Command::Recover { boot, limit, crash_block_ms: CRASH_BLOCK_MS };
        let at = self.time_of(&recover);
        apply(&mut self.memory, &recover, at).unwrap();
    }

    /// Each account has its own time, which never goes back.
    fn time_of(&self, command: &Command) -> UnixMillis {
        let MemoryState { credentials, reservations, entries, .. } = &self.memory;
        let key = credential_named(command).and_then(|id| credentials.get(&id));
        let named = command.account().or(key.map(|key| key.account));
        let is_about = |id: AccountId| match command {
            Command::Recover { .. } => reservations.keys().any(|key| key.account == id),
            _ => named == Some(id),
        };
        let earlier = entries.iter().filter(|entry| is_about(entry.account));
        earlier.map(|entry| entry.at).max().unwrap_or_default().max(UnixMillis(self.now))
    }

    /// Either the command happened or it did not; an admission whose answer was lost is released.
    fn cut(&mut self, portions: u32, arrives: bool, mut command: Command) {
        self.address(&mut command);
        if let Command::Admit(admit) = &mut command {
            // Attempts are never made twice, and this one may leave no row that tells of it.
            admit.attempt = AttemptId(id(1_000 + self.memory.entries.len() as u128));
        }
        let Some((done, answer)) = self.expect(&command) else { return };
        let at = self.time_of(&command);
        self.proxy.cut_after(portions, arrives);
        let found = self.node.apply(command.clone().into());
        self.proxy.mend();
        self.node.notice_failure();
        if !matches!(found, Err(StoreError::Unavailable(_))) {
            assert_eq!(told(found), answer, "{command:?}");
            self.memory = done;
            return;
        }
        self.node.reconnect();
        self.node.wait_for_others();
        let mut possible = [done, self.memory.clone()];
        if let Command::Admit(admit) = &command {
            let cause = ReleaseCause::TurnedAway(FailureCode::ControlPlaneUnavailable);
            let release = Command::Release { key: admit.key, attempt: admit.attempt, cause };
            // The release is refused if there is nothing to release.
            for memory in &mut possible {
                drop(apply(memory, &release, at));
            }
        }
        let found = self.stored();
        let place = possible.iter().position(|memory| in_order(memory) == found);
        let place = place.unwrap_or_else(|| panic!("neither done nor undone: {command:?}"));
        self.memory = possible[place].clone();
    }

    /// Gives an admission the boot that runs now, and an attempt that was not made before.
    fn address(&self, command: &mut Command) {
        let Command::Admit(admit) = command else { return };
        admit.boot = self.node.store.boot();
        let entries = &self.memory.entries;
        let mut attempts = entries.iter().filter_map(|entry| Some(entry.reservation()?.1));
        if attempts.any(|attempt| attempt == admit.attempt) {
            admit.attempt = AttemptId(id(1_000 + entries.len() as u128));
        }
    }

    /// The state after the command and its answer as text. `None` for a violation, after which no
    /// request is admitted.
    fn expect(&self, command: &Command) -> Option<(MemoryState, String)> {
        let mut memory = self.memory.clone();
        let answer = apply(&mut memory, command, self.time_of(command));
        if matches!(answer, Err(ApplyError::Violated(_))) {
            return None;
        }
        Some((memory, format!("{:?}", answer.map_err(|error| error.to_string()))))
    }

    fn apply(&mut self, mut command: Command) {
        self.address(&mut command);
        let Some((memory, answer)) = self.expect(&command) else { return };
        let found = self.node.apply(command.clone().into());
        assert_eq!(told(found), answer, "{command:?}");
        self.memory = memory;
    }

    fn pass(&mut self, milliseconds: u64) {
        self.now += milliseconds;
        self.clock.set(self.now);
        self.node.sweep();
        // Sweeps never go by an earlier time than the node found when it opened the ledger.
        let now = self.node.store.now();
        self.memory.crashes.retain(|_, crashes| crashes.count_at(now, CRASH_BLOCK_MS));
        let tombstone_ms = RequestSettings::default().tombstone_ms();
        let is_kept = |record: &RequestRecord| {
            record.latest().finished_at.is_none_or(|ended| ended.0 + tombstone_ms > now.0)
        };
        self.memory.requests.retain(|_, record| is_kept(record));
    }

    fn compare(&self) {
        assert_eq!(self.stored(), in_order(&self.memory));
        assert_eq!(self.memory.audit(), Vec::<String>::new());
        self.node.assert_sound();
    }

    /// Everything in the database.
    fn stored(&self) -> MemoryState {
        let reading = self.node.reading();
        let granted = reading.grants().unwrap().map(|row| {
            let (account, reference, granted) = row.unwrap();
            ((account, reference), granted)
        });
        MemoryState {
            accounts: keyed(AuditSource::accounts(&reading), |row| row.id),
            balances: reading.all_balances().unwrap().map(Result::unwrap).collect(),
            applications: keyed(AuditSource::applications(&reading), |row| row.id),
            credentials: keyed(AuditSource::credentials(&reading), |row| row.id),
            granted: granted.collect(),
            requests: keyed(AuditSource::requests(&reading), |row| row.key),
            archived: BTreeMap::new(),
            reservations: keyed(AuditSource::reservations(&reading), |row| row.key),
            crashes: crashes(&reading),
            chain_per_account: true,
            set_back: Vec::new(),
            entries: AuditSource::entries(&reading, &JournalHeads::default())
                .unwrap()
                .map(Result::unwrap)
                .collect(),
        }
    }
}

fn crashes(reading: &AuditReading<'_>) -> BTreeMap<InputKey, Crashes> {
    let rows = reading.all("select account, fingerprint, row from crashes", |row| {
        let key = (AccountId(row.get(0)), fixed(row, 1).unwrap());
        Ok((key, content(row, 2, &crash_key(key.0, &key.1))?))
    });
    rows.unwrap().map(Result::unwrap).collect()
}

fn told(answer: Result<Outcome, StoreError>) -> String {
    format!("{:?}", answer.map_err(|error| error.to_string()))
}

/// The same state with its entries in the order of the database, chain by chain.
fn in_order(memory: &MemoryState) -> MemoryState {
    let mut ordered = memory.clone();
    ordered.entries.sort_by_key(|entry| (entry.account, entry.sequence));
    ordered
}

fn keyed<K: Ord, T>(rows: RowIter<'_, T>, key: impl Fn(&T) -> K) -> BTreeMap<K, T> {
    rows.unwrap().map(Result::unwrap).map(|row| (key(&row), row)).collect()
}

fn agree(cases: u32, longest: usize) {
    let Some(cluster) = cluster::shared() else { return };
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let steps = proptest::collection::vec(step(), 1..longest);
    let run = |steps: Vec<Step>| {
        steps.into_iter().fold(Pair::new(cluster), Pair::take).compare();
        Ok(())
    };
    TestRunner::new(config).run(&steps, run).unwrap();
}

#[test]
fn memory_and_database_agree() {
    agree(24, 60);
}

#[test]
#[ignore = "minutes: many more and longer sequences"]
fn memory_and_database_agree_for_long() {
    agree(1_000, 200);
}

//! Disks that lose power in the middle of commands, answers and sweeps: no acknowledged command is
//! lost, and every reservation ends once.

use super::super::segments;
use super::Now;
use super::media::{Random, SimulatedDisk};
use super::*;
use crate::backend::{LedgerReader, Snapshot};
use crate::limits::Limits;
use crate::queue::{WriteAction, WriteJob};
use crate::shared::StoreShared;
use crate::writer::Writer;
use crate::{AuditPolicy, AuditReport, OpenProgress, StoreResult, prepare};
use bytes::Bytes;
use cresset_ledger::AttemptState;
use cresset_ledger::audit;
use std::collections::HashMap;
use tokio::sync::oneshot;

/// The writer without its thread. The test takes every step, so a seed decides everything.
pub struct Bench {
    disk: SimulatedDisk,
    clock: TestClock,
    pub backend: Arc<EmbeddedBackend>,
    pub shared: Arc<StoreShared>,
    writer: Writer<EmbeddedBackend>,
}

impl Bench {
    pub fn open(disk: &SimulatedDisk, clock: &TestClock) -> StoreResult<Self> {
        let backend = Arc::new(EmbeddedBackend::open_on(Arc::new(disk.clone()))?);
        let (clock, limits) = (clock.clone(), Limits::default());
        let shown = Arc::new(clock.clone());
        let (shared, writer) =
            prepare(&backend, shown, limits, AuditPolicy::Always, &OpenProgress::default())?;
        Ok(Self { disk: disk.clone(), clock, backend, shared, writer })
    }

    /// Applies the commands as one batch; `None` for a command that got no answer.
    pub fn apply(&mut self, commands: Vec<Command>) -> Vec<Option<StoreResult<Outcome>>> {
        self.perform(commands.into_iter().map(WriteAction::from))
    }

    fn perform(
        &mut self,
        actions: impl IntoIterator<Item = WriteAction>,
    ) -> Vec<Option<StoreResult<Outcome>>> {
        let (jobs, answers): (Vec<_>, Vec<_>) = actions
            .into_iter()
            .map(|action| {
                let (reply, answer) = oneshot::channel();
                (WriteJob::new(action, Some(reply)), answer)
            })
            .unzip();
        self.writer.commit(jobs);
        answers.into_iter().map(|mut answer| answer.try_recv().ok()).collect()
    }

    /// Applies commands whose outcome no caller waits for.
    pub fn detach(&mut self, commands: Vec<Command>) {
        let jobs = commands.into_iter().map(|command| WriteJob::new(command.into(), None));
        self.writer.commit(jobs.collect());
    }

    pub fn sweep(&mut self) {
        while self.writer.sweep().unwrap() {}
    }

    /// Audits what is new and seals it.
    pub fn seal(&mut self) {
        let source = self.backend.audit_source().unwrap();
        assert!(self.shared.audit_news(&*source, &audit::unpaced).unwrap().ok);
        self.writer.seal().unwrap();
    }

    /// Moves everything old enough into closed parts of the journal.
    pub fn close_parts(&mut self) {
        self.seal();
        while self.backend.close_journal_part(&audit::unpaced).unwrap() {
            self.sweep();
        }
    }

    /// Registers a part that was closed, and leaves its live rows.
    pub fn register_part(&self) {
        assert!(self.backend.with_files(segments::sweep).unwrap());
    }

    /// `close_parts` on a disk that may fail meanwhile.
    fn try_to_close_parts(&mut self) {
        let closed = || {
            let source = self.backend.audit_source().ok()?;
            self.shared.audit_news(&*source, &audit::unpaced).ok()?;
            drop(source);
            self.writer.seal().ok()?;
            self.backend.close_journal_part(&audit::unpaced).ok()
        };
        if closed() == Some(true) {
            while let Ok(true) = self.writer.sweep() {}
        }
    }

    pub fn report(&self) -> AuditReport {
        audit::everything(&self.backend.view().unwrap(), &audit::unpaced).unwrap()
    }

    /// Stops in good order and starts again.
    pub fn reopen(self) -> Self {
        let Self { disk, clock, backend, shared, writer } = self;
        writer.close();
        drop((backend, shared));
        Self::open(&disk, &clock).unwrap()
    }

    pub fn try_reconnect(&mut self) {
        self.writer.reconnect();
    }

    /// Reconnects to a repaired disk.
    pub fn reconnect(&mut self) {
        while !self.shared.health.reachable() {
            self.writer.reconnect();
        }
    }

    pub fn audit(&self) -> Vec<String> {
        self.report().violations
    }

    pub fn state(&self, request: u128) -> Option<AttemptState> {
        let record = self.backend.view().unwrap().request(&key(request)).now().unwrap();
        record.map(|record| record.latest().state)
    }

    /// Asserts that the audit finds nothing, `debited` was charged and nothing is reserved.
    pub fn assert_balanced(&self, debited: u64, context: u64) {
        let premium = self.premium();
        assert_eq!((premium.debited.get(), premium.reserved.get()), (debited, 0), "{context}");
        assert_eq!(self.audit(), Vec::<String>::new(), "{context}");
    }

    pub fn premium(&self) -> cresset_ledger::Balance {
        let snapshot = self.backend.view().unwrap();
        Snapshot::balances(&snapshot, AccountId(id(1))).now().unwrap().premium
    }
}

pub fn opened(balance: u64) -> (SimulatedDisk, TestClock, Bench) {
    opened_on(SimulatedDisk::formatted(), balance)
}

fn opened_on(disk: SimulatedDisk, balance: u64) -> (SimulatedDisk, TestClock, Bench) {
    let clock = TestClock::at(1_000_000);
    let mut bench = Bench::open(&disk, &clock).unwrap();
    for answer in bench.apply(opening(balance)) {
        answer.unwrap().unwrap();
    }
    (disk, clock, bench)
}

const HOUR: u64 = 3_600_000;

/// The facts about its requests that the client side of a test knows.
#[derive(Default)]
struct Known {
    next: u128,
    admitted: Vec<u128>,
    /// The charge of every acknowledged settlement, and the time at which its answer expires.
    settled: HashMap<u128, (u32, u64)>,
}

impl Known {
    /// Sends a few admissions, answers and settlements as one batch, and records those that are
    /// acknowledged. Sometimes half a day passes.
    fn step(&mut self, bench: &mut Bench, random: &mut Random) {
        let (boot, now) = (bench.shared.boot(), bench.clock.now().0);
        let mut actions = Vec::new();
        let mut asked = Vec::new();
        for _ in 0..=random.below(3) {
            self.next += 1;
            actions.push(admit(self.next, self.next, boot, 10).into());
            asked.push((self.next, None));
        }
        while !self.admitted.is_empty() && random.below(2) == 0 {
            let place = random.below(self.admitted.len());
            let request = self.admitted.swap_remove(place);
            let charge = random.below(11) as u32;
            let body = body_of(answer(request), now + 24 * HOUR);
            let command = settle(request, request, charge);
            actions.push(WriteAction::new(command, Some((key(request), body))));
            asked.push((request, Some(charge)));
        }
        for ((request, charge), answer) in asked.into_iter().zip(bench.perform(actions)) {
            match (charge, answer) {
                (None, Some(outcome)) if is_admitted(&outcome) => self.admitted.push(request),
                (Some(charge), Some(Ok(Outcome::Settled { .. }))) => {
                    self.settled.insert(request, (charge, now + 24 * HOUR));
                }
                _ => {}
            }
        }
        if random.below(4) == 0 {
            bench.try_to_close_parts();
        }
        // The time never advances so far that tombstones are removed.
        if random.below(6) == 0 && now < 25 * 24 * HOUR {
            bench.clock.set(now + 12 * HOUR);
            while let Ok(true) = bench.writer.sweep() {}
        }
    }

    /// Checks that every acknowledged settlement is there, and that the money adds up.
    fn check(&mut self, bench: &Bench, seed: u64) {
        assert_eq!(bench.audit(), Vec::<String>::new(), "seed {seed}");
        let snapshot = bench.backend.view().unwrap();
        let mut debited = 0;
        for record in requests_of(&snapshot, AccountId(id(1))) {
            let latest = record.latest();
            assert!(latest.state.is_terminal(), "seed {seed}: left open");
            debited += latest.charged.total().get();
        }
        let now = bench.clock.now();
        for (request, (charge, expires_at)) in &self.settled {
            let record = snapshot.request(&key(*request)).now().unwrap();
            let latest =
                record.unwrap_or_else(|| panic!("seed {seed}: {request} lost")).latest().clone();
            assert_eq!(latest.state, AttemptState::Completed, "seed {seed}");
            assert_eq!(latest.charged.total().get(), u64::from(*charge), "seed {seed}");
            let body = bench.backend.body(&key(*request), now).now().unwrap();
            assert_eq!(
                body,
                (now.0 < *expires_at).then(|| body_of(answer(*request), *expires_at)),
                "seed {seed}: {request}"
            );
        }
        for request in self.admitted.drain(..) {
            let state = bench.state(request);
            assert_eq!(state, Some(AttemptState::Failed), "seed {seed}: {request}");
        }
        let premium = bench.premium();
        assert_eq!((premium.debited.get(), premium.reserved.get()), (debited, 0), "seed {seed}");
    }
}

fn answer(request: u128) -> Bytes {
    // Some are long enough to be compressed.
    Bytes::from(format!("the answer to {request}").repeat(request as usize % 90 + 1))
}

/// Power is lost at a random write, sometimes again while the ledger is being opened.
fn lose_power_often(seeds: std::ops::Range<u64>, losses: u32) {
    for seed in seeds {
        let mut random = Random(seed);
        let disk = SimulatedDisk::formatted().closing_parts_of(6);
        let (disk, clock, mut bench) = opened_on(disk, 1_000_000);
        let mut known = Known::default();
        for _ in 0..losses {
            disk.fail_after(random.below(60) as u64);
            while !disk.is_broken() {
                known.step(&mut bench, &mut random);
            }
            drop(bench);
            disk.lose_power(&mut random);
            if random.below(3) == 0 {
                disk.fail_after(random.below(40) as u64);
                drop(Bench::open(&disk, &clock));
                disk.lose_power(&mut random);
            }
            bench =
                Bench::open(&disk, &clock).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            known.check(&bench, seed);
        }
        println!("seed {seed}: {losses} losses of power survived");
    }
}

#[test]
fn a_loss_of_power_loses_nothing_acknowledged() {
    lose_power_often(0..8, 8);
}

#[test]
#[ignore = "minutes: many more losses of power"]
fn thousands_of_losses_of_power_lose_nothing() {
    lose_power_often(1_000..3_000, 10);
}

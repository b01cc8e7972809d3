//! The writer without its thread, over a database: the test takes every step.

use super::super::audit_source::AuditReading;
use super::super::session::DatabaseSession;
use super::super::{PostgresBackend, PostgresConfig};
use crate::backend::Backend;
use crate::queue::{WriteAction, WriteJob};
use crate::shared::StoreShared;
use crate::tests::*;
use crate::writer::Writer;
use crate::{AuditPolicy, Limits, OpenProgress, StoreResult, prepare};
use cresset_base::clock::{Clock, UnixMillis};
use cresset_ledger::audit::{self, AuditSource};
use cresset_ledger::state::JournalHead;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;

/// A clock that shows the time it was set to.
#[derive(Clone, Default)]
pub struct SetClock(Arc<AtomicU64>);

impl SetClock {
    pub fn set(&self, now: u64) {
        self.0.store(now, Ordering::Relaxed);
    }
}

impl Clock for SetClock {
    fn now(&self) -> UnixMillis {
        UnixMillis(self.0.load(Ordering::Relaxed))
    }
}

pub struct Node {
    place: PostgresConfig,
    clock: SetClock,
    pub backend: Arc<PostgresBackend>,
    pub shared: Arc<StoreShared>,
    writer: Writer<PostgresBackend>,
}

impl Node {
    pub fn open(place: &PostgresConfig, clock: &SetClock) -> Self {
        let backend = Arc::new(PostgresBackend::open(place).unwrap());
        let shown = Arc::new(clock.clone());
        let (limits, policy) = (Limits::default(), AuditPolicy::Always);
        let (shared, writer) =
            prepare(&backend, shown, limits, policy, &OpenProgress::default()).unwrap();
        Self { place: place.clone(), clock: clock.clone(), backend, shared, writer }
    }

    /// Applies a command with its body, which a caller waits for.
    pub fn apply(&mut self, action: WriteAction) -> StoreResult<Outcome> {
        let (reply, mut answer) = oneshot::channel();
        self.writer.commit(vec![WriteJob::new(action, Some(reply))]);
        answer.try_recv().unwrap()
    }

    /// What the writer does again and again between its batches.
    pub fn look_at_others(&mut self) {
        self.writer.look_at_others();
    }

    /// What the writer does once a minute with what audits found.
    pub fn seal(&self) {
        self.writer.seal().unwrap();
    }

    pub fn sweep(&mut self) {
        while self.writer.sweep().unwrap() {}
    }

    /// Stops in good order and starts again.
    pub fn reopen(self) -> Self {
        let Self { place, clock, backend, shared, writer } = self;
        writer.close();
        drop((backend, shared));
        Self::open(&place, &clock)
    }

    /// Ends as a killed process does and starts again.
    pub fn kill(self) -> Self {
        let (place, clock) = (self.place.clone(), self.clock.clone());
        drop(self);
        Self::open(&place, &clock)
    }

    /// Connects again where the connection of the writer was cut after its last answer.
    pub fn notice_cut(&mut self) {
        let alive = self.backend.transact(0, &[], UnixMillis(0), |_| Ok(()));
        if alive.is_err() && self.shared.health.reachable() {
            self.shared.health.disconnect("the connection was cut");
            self.reconnect();
        }
    }

    /// Waits until the writer has a connection again.
    pub fn reconnect(&mut self) {
        while !self.shared.health.reachable() {
            std::thread::sleep(Duration::from_millis(2));
            self.writer.reconnect();
        }
    }

    /// Waits until no transaction changes an account: the server may still commit what it was sent
    /// over a connection that was cut.
    pub fn wait_for_others(&self) {
        let lock = async |session: &DatabaseSession| {
            session.script("select 1 from accounts for update").await
        };
        self.backend.with_writer(lock).unwrap();
    }

    pub fn place(&self) -> &PostgresConfig {
        &self.place
    }

    pub fn assert_sound(&self) {
        let reading = self.reading();
        for report in [
            audit::everything(&reading, &audit::unpaced).unwrap(),
            audit::since(&reading, middle(&reading), &audit::unpaced).unwrap(),
        ] {
            assert_eq!(report.violations, Vec::<String>::new());
        }
    }

    pub fn reading(&self) -> AuditReading<'_> {
        AuditReading::begin(&self.backend.driver, &self.backend.connector).unwrap()
    }
}

/// A head in the middle of each chain.
fn middle(reading: &AuditReading<'_>) -> audit::JournalHeads {
    let heads = AuditSource::heads(reading).unwrap().map(Result::unwrap);
    let heads: Vec<_> = heads.collect();
    let half = heads.into_iter().filter(|(_, head)| head.sequence > 1).map(|(chain, head)| {
        let entry = reading.entry(chain, head.sequence / 2).unwrap().unwrap();
        (chain, JournalHead { sequence: entry.sequence, hash: entry.hash })
    });
    half.collect()
}

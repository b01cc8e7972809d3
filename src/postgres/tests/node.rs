//! A store over a database whose steps a test takes.

use crate::audit_source::AuditReading;
use crate::session::DatabaseSession;
use crate::{PostgresBackend, PostgresConfig};
use cresset_base::{Clock, UnixMillis};
use cresset_ledger::JournalHead;
use cresset_ledger::audit::{self, AuditSource};
use cresset_store::testing::stepped::SteppedStore;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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

pub(super) struct Node {
    place: PostgresConfig,
    clock: SetClock,
    stepped: SteppedStore<PostgresBackend>,
}

impl Deref for Node {
    type Target = SteppedStore<PostgresBackend>;

    fn deref(&self) -> &Self::Target {
        &self.stepped
    }
}

impl DerefMut for Node {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.stepped
    }
}

impl Node {
    pub fn open(place: &PostgresConfig, clock: &SetClock) -> Self {
        let backend = PostgresBackend::open(place).unwrap();
        let stepped = SteppedStore::open(backend, Arc::new(clock.clone()));
        Self { place: place.clone(), clock: clock.clone(), stepped }
    }

    /// Stops in good order and starts again.
    pub fn reopen(self) -> Self {
        self.stepped.close();
        Self::open(&self.place, &self.clock)
    }

    /// Ends as a killed process does and starts again.
    pub fn kill(self) -> Self {
        let (place, clock) = (self.place.clone(), self.clock.clone());
        drop(self);
        Self::open(&place, &clock)
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

//! The one thread that changes anything: it turns what waits into one transaction, commits, then
//! acknowledges.
//!
//! After a failed commit nothing is known of its batch. The handle is never asked to write again,
//! and the ledger reopened. Who waits is told that nothing is known, and may send the command
//! again: a repeat changes nothing where the first had become durable. Detached ends of attempts
//! are repeated from here, and admissions that were answered as unknown are released.

#![expect(clippy::disallowed_methods, reason = "the writer waits for its next turn by a clock")]

use super::embedded::bodies;
use super::embedded::files::Files;
use super::embedded::retention;
use super::embedded::state::WriteState;
use super::embedded::tables;
use super::limits::Limits;
use super::queue::{Taken, WriteAction, WriteJob};
use super::{StoreError, StoreResult, StoreShared};
use crate::clock::UnixMillis;
use crate::failpoint::failpoint;
use crate::ids::AttemptId;
use crate::ledger::apply::{ApplyError, apply};
use crate::ledger::commands::ReleaseCause;
use crate::ledger::state::{StateError, StateResult};
use crate::ledger::{Command, FailureCode, Outcome, RequestKey};
use redb::ReadableDatabase;
use std::collections::VecDeque;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Commands in one transaction.
const MAX_BATCH: usize = 256;
/// Reservations of earlier boots released in one transaction.
const RECOVERY_BATCH: usize = 1_000;
/// Free space under which a failed ledger is not reopened yet.
const MIN_REOPEN_BYTES: u64 = 16 << 20;
/// How long one look at the free space holds.
const SPACE_CHECK: Duration = Duration::from_secs(1);
/// Between two passes over what is past retention.
const MAINTENANCE_INTERVAL: Duration = Duration::from_mins(1);
const FIRST_RETRY: Duration = Duration::from_millis(20);
const LAST_RETRY: Duration = Duration::from_secs(5);

pub(super) struct Writer {
    shared: Arc<StoreShared>,
    limits: Limits,
    /// The latest time any command was given; stored time never goes back.
    clock: UnixMillis,
    /// What the unusable ledger is owed, in the order it came.
    pending_ends: VecDeque<WriteJob>,
    retry: Duration,
    next_retry: Instant,
    next_maintenance: Instant,
    space_checked: Option<(Instant, bool)>,
}

/// Why a batch was not committed, or may not have been.
enum BatchFailure {
    /// The job at this place met a damaged row; without it the others can be applied.
    Damaged(usize, StateError),
    /// The handle must not be used again; the batch may be durable.
    Handle(String),
}

impl From<StateError> for BatchFailure {
    fn from(error: StateError) -> Self {
        Self::Handle(error.to_string())
    }
}

/// Ends the process where a panic passes it.
struct EndOnPanic;

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

impl Writer {
    pub fn new(shared: Arc<StoreShared>, limits: Limits, clock: UnixMillis) -> Self {
        let now = Instant::now();
        Self {
            shared,
            limits,
            clock,
            pending_ends: VecDeque::new(),
            retry: FIRST_RETRY,
            next_retry: now,
            next_maintenance: now,
            space_checked: None,
        }
    }

    /// Ends what earlier boots left open. Before this, nothing may be admitted.
    pub fn recover(&mut self) -> StoreResult {
        let boot = self.shared.boot;
        self.shared.with_files(|files| Ok(bodies::remove_orphans(files)?))?;
        let mut total = 0;
        loop {
            let limit = RECOVERY_BATCH;
            let job = WriteJob::new(WriteAction::Apply(Command::Recover { boot, limit }), None);
            let outcomes = self.transact(&[job]).map_err(|failure| match failure {
                BatchFailure::Damaged(_, error) => error.into(),
                BatchFailure::Handle(why) => StoreError::Unavailable(why),
            })?;
            let Some(Ok(Outcome::Recovered { released, remaining })) = outcomes.into_iter().next()
            else {
                let why = "reservations of an earlier start cannot be released: run `cresset ledger audit`";
                return Err(StoreError::Unusable(why.into()));
            };
            total += released;
            failpoint!("store::recovered");
            if !remaining {
                break;
            }
        }
        if total > 0 {
            tracing::warn!(released = total, "released reservations of earlier starts");
            self.shared.released(ReleaseCause::Failed(FailureCode::NodeRestarted), total as u64);
        }
        Ok(())
    }

    /// Works until the queue is closed and empty, then marks the stop as orderly.
    pub fn run(mut self) {
        loop {
            let taken = self.shared.queue.take(MAX_BATCH, self.patience());
            self.reconnect();
            match taken {
                Taken::Jobs(jobs) if self.shared.health.reachable() => self.commit(jobs),
                Taken::Jobs(jobs) => self.defer(jobs, "its storage failed and is being reopened"),
                Taken::Idle => {}
                Taken::Closed => break,
            }
            self.run_maintenance();
        }
        self.close();
    }

    fn patience(&self) -> Duration {
        let next =
            if self.shared.health.reachable() { self.next_maintenance } else { self.next_retry };
        next.saturating_duration_since(Instant::now())
    }

    /// Applies the jobs as one transaction and answers each after the commit.
    pub fn commit(&mut self, mut jobs: Vec<WriteJob>) {
        while !jobs.is_empty() {
            match self.transact_guarded(&jobs) {
                Ok(results) => return self.acknowledge(jobs, results),
                Err(BatchFailure::Damaged(index, error)) => {
                    self.shared.health.distrust(&error.to_string());
                    jobs.remove(index).answer(Err(error.into()));
                }
                Err(BatchFailure::Handle(why)) => {
                    self.shared.disconnect(&why);
                    return self.defer(jobs, &why);
                }
            }
        }
    }

    /// A panic of the database is one more way for a handle to fail.
    fn transact_guarded(
        &mut self,
        jobs: &[WriteJob],
    ) -> Result<Vec<StoreResult<Outcome>>, BatchFailure> {
        panic::catch_unwind(AssertUnwindSafe(|| self.transact(jobs)))
            .unwrap_or_else(|_| Err(BatchFailure::Handle("the database panicked".into())))
    }

    fn transact(&mut self, jobs: &[WriteJob]) -> Result<Vec<StoreResult<Outcome>>, BatchFailure> {
        let shared = Arc::clone(&self.shared);
        let Some(files) = &*shared.files() else {
            return Err(BatchFailure::Handle("it is not open".into()));
        };
        self.clock = self.clock.max(shared.clock.now());
        bodies::write_all(&files.bodies, jobs)?;
        let archive =
            tables::open(&files.bodies.begin_read().map_err(StateError::from)?, tables::ARCHIVE)?;
        let txn = files.ledger.begin_write().map_err(StateError::from)?;
        let mut state = WriteState::open(&txn, archive)?;
        let mut results = Vec::with_capacity(jobs.len());
        for (index, job) in jobs.iter().enumerate() {
            results.push(self.perform(&mut state, &job.action, index)?);
        }
        if state.finish(self.clock)? {
            failpoint!("store::before_commit");
            failpoint!("store::commit_lost", |_| Err(BatchFailure::Handle(
                "the commit failed".into()
            )));
            txn.commit().map_err(StateError::from)?;
            failpoint!("store::after_commit");
            failpoint!("store::commit_unknown", |_| Err(BatchFailure::Handle(
                "the commit failed".into()
            )));
        }
        Ok(results)
    }

    fn perform(
        &mut self,
        state: &mut WriteState<'_>,
        action: &WriteAction,
        index: usize,
    ) -> Result<StoreResult<Outcome>, BatchFailure> {
        let WriteAction::Apply(command) = action else {
            return Ok(Ok(Outcome::Done));
        };
        if let Err(why) = self.permit(command) {
            return Ok(Err(StoreError::Unavailable(why)));
        }
        match apply(state, command, self.clock) {
            Ok(outcome) => Ok(Ok(outcome)),
            Err(ApplyError::Refused(refusal)) => Ok(Err(refusal.into())),
            Err(ApplyError::Violated(violation)) => {
                self.shared.health.distrust(&violation.to_string());
                Ok(Err(StoreError::Unavailable(violation.to_string())))
            }
            Err(ApplyError::State(error @ StateError::Corrupt(_))) => {
                Err(BatchFailure::Damaged(index, error))
            }
            Err(ApplyError::State(error)) => Err(error.into()),
        }
    }

    /// What begins something new needs a trusted ledger and room to end it in.
    fn permit(&mut self, command: &Command) -> Result<(), String> {
        if matches!(command, Command::Admit(_) | Command::Grant { .. }) {
            self.shared.health.trusted()?;
        }
        if matches!(command, Command::Admit(_)) && self.is_space_low() {
            return Err("less disk space is free than requests.min_free_mib: make room".into());
        }
        Ok(())
    }

    fn is_space_low(&mut self) -> bool {
        let fresh = |(at, _): &(Instant, bool)| at.elapsed() < SPACE_CHECK;
        if let Some((_, low)) = self.space_checked.filter(fresh) {
            return low;
        }
        let low = self.shared.is_space_low();
        if low {
            tracing::error!(
                "less space is free where the data folder is than requests.min_free_mib: new requests are refused"
            );
        }
        self.space_checked = Some((Instant::now(), low));
        low
    }

    fn acknowledge(&self, jobs: Vec<WriteJob>, results: Vec<StoreResult<Outcome>>) {
        // Dropped before the jobs are: nobody is told "unknown" of what was committed by a process
        // that is about to end.
        let _end = EndOnPanic;
        failpoint!("store::acknowledge");
        for (job, result) in jobs.into_iter().zip(results) {
            if let (WriteAction::Apply(Command::Release { cause, .. }), Ok(Outcome::Request(_))) =
                (&job.action, &result)
            {
                self.shared.released(*cause, 1);
            }
            let admit_ids = job.action.admit_ids();
            let admitted = matches!(result, Ok(Outcome::Admitted(_)));
            let heard = job.answer(result);
            if let Some((key, attempt)) = admit_ids.filter(|_| admitted && !heard) {
                self.shared.queue.push(release_unheard(key, attempt));
            }
        }
    }

    /// Keeps for later what nobody would repeat; everything else is answered as unknown.
    fn defer(&mut self, jobs: Vec<WriteJob>, why: &str) {
        for job in jobs {
            if job.is_detached() && job.action.ends_attempt() {
                self.pending_ends.push_back(job);
                continue;
            }
            if let Some((key, attempt)) = job.action.admit_ids() {
                self.pending_ends.push_back(release_unheard(key, attempt));
            }
            job.answer(Err(StoreError::Unavailable(why.to_owned())));
        }
    }

    /// Opens the ledger again when it is time to try, and pays what it is owed.
    pub fn reconnect(&mut self) {
        if self.shared.health.reachable() || Instant::now() < self.next_retry {
            return;
        }
        if self.has_room() && self.reopen() {
            self.flush();
        }
        let failed = !self.shared.health.reachable();
        self.retry = if failed { (self.retry * 2).min(LAST_RETRY) } else { FIRST_RETRY };
        self.next_retry = Instant::now() + self.retry;
    }

    /// On a full disk the old handle still serves reads; a new one could not be made.
    fn has_room(&self) -> bool {
        self.shared.disk.free_bytes().is_ok_and(|free| free >= MIN_REOPEN_BYTES)
    }

    fn reopen(&mut self) -> bool {
        // No second handle can be opened beside the first.
        drop(self.shared.take_files());
        let reopened = panic::catch_unwind(AssertUnwindSafe(|| self.try_reopen()));
        match reopened {
            Ok(Ok(())) => tracing::info!("the ledger is open again"),
            Ok(Err(error)) => tracing::error!(%error, "the ledger cannot be reopened"),
            Err(_) => tracing::error!("the database panicked while the ledger was reopened"),
        }
        self.shared.health.reachable()
    }

    fn try_reopen(&mut self) -> StoreResult {
        failpoint!("store::reopen", |_| Err(StoreError::Unavailable("it stays closed".into())));
        let files = Files::open(&*self.shared.disk)?;
        self.shared.audit_news(&files.snapshot()?)?;
        self.clock = self.clock.max(files.clock()?);
        self.shared.connect(files);
        Ok(())
    }

    fn flush(&mut self) {
        while self.shared.health.reachable() && !self.pending_ends.is_empty() {
            let next = self.pending_ends.len().min(MAX_BATCH);
            let jobs = self.pending_ends.drain(..next).collect();
            self.commit(jobs);
        }
    }

    fn run_maintenance(&mut self) {
        if !self.shared.health.reachable() || Instant::now() < self.next_maintenance {
            return;
        }
        self.next_maintenance = Instant::now() + MAINTENANCE_INTERVAL;
        match panic::catch_unwind(AssertUnwindSafe(|| self.sweep())) {
            Ok(Ok(true)) => self.next_maintenance = Instant::now(),
            Ok(Ok(false)) => {}
            Ok(Err(StateError::Corrupt(what))) => self.shared.health.distrust(&what),
            Ok(Err(error @ StateError::Io(_))) => self.shared.disconnect(&error.to_string()),
            Err(_) => self.shared.disconnect("the database panicked"),
        }
    }

    /// True when more is due. Goes by the clock itself: stored time, which never goes back, may be
    /// ahead of it, and nothing may be forgotten early.
    pub fn sweep(&mut self) -> StateResult<bool> {
        match &*self.shared.files() {
            Some(files) => retention::sweep(files, self.shared.clock.now(), &self.limits),
            None => Ok(false),
        }
    }

    pub fn close(mut self) {
        self.next_retry = Instant::now();
        self.reconnect();
        if !self.pending_ends.is_empty() {
            tracing::error!(count = self.pending_ends.len(), "stopped with commands unwritten");
        }
        let files = self.shared.take_files();
        let Some(files) = files.filter(|_| self.pending_ends.is_empty()) else {
            return;
        };
        if let Err(error) = files.set_clean_marker(self.shared.boot, true) {
            tracing::error!(%error, "the stop could not be recorded");
        }
    }
}

/// Ends an admission nobody waits for.
pub(super) fn release_unheard(key: RequestKey, attempt: AttemptId) -> WriteJob {
    let cause = ReleaseCause::Failed(FailureCode::ControlPlaneUnavailable);
    let release = Command::Release { key, attempt, cause };
    WriteJob::new(WriteAction::Apply(release), None)
}

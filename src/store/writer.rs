//! The threads that change anything: one for each lane of the queue. Each turns the waiting
//! commands of its lane into one transaction, commits it, then tells the callers. The thread of the
//! first lane also does what concerns the whole ledger, such as reopening it.
//!
//! A failed commit leaves its batch in doubt: it may be durable or not. The backend is not written
//! to again before it was reopened. Callers that wait are told `Unavailable` and may send their
//! command again, because commands are idempotent. Ends of attempts without a waiting caller are
//! kept and repeated from here, and admissions that were answered `Unavailable` are released.

#![expect(clippy::disallowed_methods, reason = "the writer measures the time until its next turn")]

use super::backend::{Backend, BatchFailure, LedgerTxn};
use super::limits::Limits;
use super::queue::{Taken, WriteAction, WriteJob};
use super::{StoreError, StoreResult, StoreShared};
use cresset_base::{AttemptId, BootId, UnixMillis, failpoint};
use cresset_ledger::apply::{ApplyError, apply};
use cresset_ledger::audit::{self, AuditSource};
use cresset_ledger::{
    Command, FailureCode, Outcome, ReleaseCause, RequestKey, StateError, StateResult,
};
use std::collections::VecDeque;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// Jobs in one transaction. They share its sync: `cresset bench --ledger` made 1 332 pairs a second
/// with one client and 40 456 with 256. A larger batch would make its first caller wait longer.
const MAX_BATCH: usize = 256;
/// Reservations of earlier boots released in one transaction. It bounds the memory of a recovery,
/// and 1 000 releases still share one sync.
const RECOVERY_BATCH: usize = 1_000;
/// How long a look at the files and their free space is used. Admissions of one second use up far
/// less than the space that `requests.min_free_mib` keeps free.
const PLACE_CHECK: Duration = Duration::from_secs(1);
/// The time between two sweeps. Retention is counted in hours, so a minute is exact enough.
const MAINTENANCE_INTERVAL: Duration = Duration::from_mins(1);
/// Pause before the first attempt to reopen, doubled after each failure (exponential backoff). A
/// short disturbance is over within 20 ms; a longer one is asked after every 5 s.
const FIRST_RETRY: Duration = Duration::from_millis(20);
const LAST_RETRY: Duration = Duration::from_secs(5);

pub(super) struct Writer<B> {
    lane: usize,
    backend: Arc<B>,
    shared: Arc<StoreShared>,
    limits: Limits,
    /// The latest time that any command was given, because stored time never goes back.
    clock: UnixMillis,
    /// Ends of attempts that could not be written yet, in the order in which they came.
    pending_ends: VecDeque<WriteJob>,
    retry: Duration,
    next_retry: Instant,
    next_maintenance: Instant,
    place_checked: Option<(Instant, Option<&'static str>)>,
    /// Whether this node deletes what is past its time; another one that shares the ledger may.
    sweeps: bool,
    /// Whether the other nodes know that the ledger is not trusted.
    has_recorded_violation: bool,
}

/// The result of each job of a batch; `None` of those that were put off.
type BatchResults = Vec<Option<StoreResult<Outcome>>>;

/// Ends the process when a panic unwinds past it.
struct EndOnPanic;

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

impl<B: Backend> Writer<B> {
    /// The writer of the first lane.
    pub(super) fn new(backend: Arc<B>, shared: Arc<StoreShared>, limits: Limits) -> Self {
        Self::of_lane(0, backend, shared, limits)
    }

    fn of_lane(lane: usize, backend: Arc<B>, shared: Arc<StoreShared>, limits: Limits) -> Self {
        let now = Instant::now();
        Self {
            lane,
            backend,
            shared,
            limits,
            clock: UnixMillis::default(),
            pending_ends: VecDeque::new(),
            retry: FIRST_RETRY,
            next_retry: now,
            next_maintenance: now,
            place_checked: None,
            sweeps: true,
            has_recorded_violation: false,
        }
    }

    /// Releases the reservations of earlier boots. Nothing may be admitted before.
    pub(super) fn recover(&mut self) -> StoreResult {
        let (mut total, mut remains) = (0, true);
        while remains {
            let (released, remaining) = self.release_some()?;
            (total, remains) = (total + released, remaining);
            failpoint!("store::recovered");
        }
        if total > 0 {
            tracing::warn!(released = total, "released reservations of earlier starts");
            self.shared.released(ReleaseCause::Failed(FailureCode::NodeRestarted), total as u64);
        }
        Ok(())
    }

    /// Releases some of them in one transaction. Returns how many, and whether there are more.
    fn release_some(&mut self) -> StoreResult<(usize, bool)> {
        let (boot, limit) = (self.shared.boot(), RECOVERY_BATCH);
        let recover =
            Command::Recover { boot, limit, crash_block_ms: self.limits.requests.crash_block_ms() };
        let job = WriteJob::new(recover.into(), None);
        let outcomes = self.transact(&[job]).map_err(|failure| match failure {
            BatchFailure::Damaged(_, error) => error.into(),
            BatchFailure::InDoubt(why) => StoreError::Unavailable(why),
        })?;
        match outcomes.into_iter().next() {
            Some(Some(Ok(Outcome::Recovered { released, remaining }))) => Ok((released, remaining)),
            _ => Err(StoreError::Unusable(
                "reservations of an earlier start cannot be released: run `cresset ledger audit`"
                    .into(),
            )),
        }
    }

    /// Runs until the queue is closed and empty, then records that the stop was orderly.
    pub(super) fn run(mut self) {
        thread::scope(|scope| {
            let others = (1..self.backend.lanes()).map(|lane| self.start_beside(scope, lane));
            let others: Vec<_> = others.collect();
            while self.turn() {
                self.look_at_others();
                self.drop_seal_of_distrusted();
                self.run_maintenance();
            }
            // A lane that panics ends the process before it can be joined.
            let left = others.into_iter().filter_map(|other| other.join().ok());
            self.pending_ends.extend(left.flatten());
        });
        self.close();
    }

    /// Starts the writer of another lane, which ends with the queue and returns the ends of
    /// attempts that it could not write.
    fn start_beside<'s>(
        &self,
        scope: &'s Scope<'s, '_>,
        lane: usize,
    ) -> ScopedJoinHandle<'s, VecDeque<WriteJob>>
    where
        B: 's,
    {
        let (backend, shared) = (Arc::clone(&self.backend), Arc::clone(&self.shared));
        let mut writer = Self::of_lane(lane, backend, shared, self.limits.clone());
        let run = move || {
            let _end = EndOnPanic;
            while writer.turn() {}
            writer.pending_ends
        };
        let thread = thread::Builder::new().name(format!("store-writer-{lane}"));
        thread.spawn_scoped(scope, run).expect("a thread for a lane of the ledger can be started")
    }

    /// Takes jobs of the lane, if any come in time, and applies them. False at the queue's end.
    fn turn(&mut self) -> bool {
        // Later commands of an account come after its ends that wait.
        let keeps = !self.pending_ends.is_empty();
        let taken = self.shared.queue.take(self.lane, MAX_BATCH, self.patience(), keeps);
        if self.lane == 0 {
            self.reconnect();
        } else {
            self.flush();
        }
        match taken {
            Taken::Jobs(jobs) if self.shared.health.reachable() => self.commit(jobs),
            Taken::Jobs(jobs) => self.defer(jobs, "its storage failed and is being reopened"),
            Taken::Idle => {}
            Taken::Closed => return false,
        }
        true
    }

    /// Takes note of what the other nodes of a shared ledger did.
    pub(super) fn look_at_others(&mut self) {
        if !self.shared.health.reachable() || !B::IS_SHARED {
            return;
        }
        let others = self.backend.other_nodes();
        self.sweeps = !others.do_the_maintenance;
        self.shared.set_others_audit(others.do_the_maintenance);
        if let Some(why) = others.distrust.filter(|_| self.shared.health.trusted().is_ok()) {
            self.shared.health.distrust(&format!("another node found: {why}"));
            self.has_recorded_violation = true;
        }
        if others.have_ended_this {
            self.shared.note_ended();
        }
        let went_on = self.set_new_boot_if_requested();
        let recovered =
            went_on.and_then(|()| if others.left_behind { self.recover() } else { Ok(()) });
        if let Err(error) = recovered {
            self.shared.health.disconnect(&error.to_string());
        }
    }

    /// Registers under another boot, once what ran under the one that others ended has ended.
    fn set_new_boot_if_requested(&self) -> StoreResult {
        if self.shared.is_ended() && self.shared.new_boot_requested() {
            let boot = BootId::generate();
            self.backend.claim(boot)?;
            self.shared.set_boot(boot);
            tracing::warn!(%boot, "this node goes on under another start");
        }
        Ok(())
    }

    fn patience(&self) -> Duration {
        let next = match (self.lane, self.shared.health.reachable()) {
            (0, true) => self.next_maintenance,
            (0, false) => self.next_retry,
            _ if self.pending_ends.is_empty() => Instant::now() + MAINTENANCE_INTERVAL,
            // They can be written as soon as the first lane has reopened the ledger.
            _ => Instant::now() + FIRST_RETRY,
        };
        let next = next.saturating_duration_since(Instant::now());
        self.backend.look_interval().map_or(next, |look| next.min(look))
    }

    /// Applies the jobs as one transaction and answers each after the commit.
    pub(super) fn commit(&mut self, mut jobs: Vec<WriteJob>) {
        while !jobs.is_empty() {
            match self.transact_guarded(&jobs) {
                Ok(results) => return self.acknowledge(jobs, results),
                Err(BatchFailure::Damaged(index, error)) => {
                    self.shared.health.distrust(&error.to_string());
                    jobs.remove(index).answer(Err(error.into()));
                }
                Err(BatchFailure::InDoubt(why)) => {
                    self.shared.health.disconnect(&why);
                    return self.defer(jobs, &why);
                }
            }
        }
    }

    /// Treats a panic of the database as a failure of its handle.
    fn transact_guarded(&mut self, jobs: &[WriteJob]) -> Result<BatchResults, BatchFailure> {
        panic::catch_unwind(AssertUnwindSafe(|| self.transact(jobs)))
            .unwrap_or_else(|_| Err(BatchFailure::InDoubt("the database panicked".into())))
    }

    fn transact(&mut self, jobs: &[WriteJob]) -> Result<BatchResults, BatchFailure> {
        // In a shared ledger each account keeps its own time from going back.
        let (shown, is_shared) = (self.shared.clock.now(), B::IS_SHARED);
        self.clock = if is_shared { shown } else { self.clock.max(shown) };
        let (backend, now) = (Arc::clone(&self.backend), self.clock);
        let actions: Vec<_> = jobs.iter().map(|job| &job.action).collect();
        let lane = self.lane;
        backend.transact(lane, &actions, now, |txn| {
            let numbered = actions.iter().enumerate();
            let perform = |(index, action): (usize, &&WriteAction)| {
                if txn.puts_off(&action.command) {
                    return Ok(None);
                }
                self.perform(txn, &action.command, index).map(Some)
            };
            numbered.map(perform).collect()
        })
    }

    fn perform(
        &mut self,
        txn: &mut B::Txn<'_>,
        command: &Command,
        index: usize,
    ) -> Result<StoreResult<Outcome>, BatchFailure> {
        if let Err(why) = self.permit(txn, command) {
            return Ok(Err(StoreError::Unavailable(why)));
        }
        let now = txn.time_of(command);
        match apply(txn, command, now) {
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

    /// Admissions, grants and accounts, which may come with a grant, need a ledger that no check
    /// found broken; admissions also need free disk space, so that they can be ended, and files in
    /// their place.
    fn permit(&mut self, txn: &B::Txn<'_>, command: &Command) -> Result<(), String> {
        if matches!(
            command,
            Command::Admit(_)
                | Command::Grant { .. }
                | Command::Debit { .. }
                | Command::CreateAccount { .. }
        ) {
            self.shared.health.trusted()?;
        }
        if let Command::Admit(admit) = command {
            if admit.boot != self.shared.boot() {
                return Err("this node has begun anew: send the request again".into());
            }
            let reason = self.admission_block();
            let reason = reason.or_else(|| txn.admission_block(admit.boot));
            return reason.map_or(Ok(()), |why| Err(why.into()));
        }
        Ok(())
    }

    /// Why nothing is admitted now, which is logged.
    fn look_at_place(&self) -> Option<&'static str> {
        let reason = self.shared.admission_block();
        if let Some(why) = reason {
            tracing::error!(why, "the ledger admits nothing");
        }
        reason
    }

    fn admission_block(&mut self) -> Option<&'static str> {
        let fresh = |(at, _): &(Instant, Option<&'static str>)| at.elapsed() < PLACE_CHECK;
        if let Some((_, reason)) = self.place_checked.filter(fresh) {
            return reason;
        }
        let reason = self.look_at_place();
        self.place_checked = Some((Instant::now(), reason));
        reason
    }

    fn acknowledge(&self, jobs: Vec<WriteJob>, results: BatchResults) {
        // This guard is dropped before the jobs are. A panic therefore ends the process before any
        // caller is told that the outcome of a committed command is unknown.
        let _end = EndOnPanic;
        failpoint!("store::acknowledge");
        let mut put_off = Vec::new();
        for (job, result) in jobs.into_iter().zip(results) {
            let Some(result) = result else {
                put_off.push(job);
                continue;
            };
            if let (Command::Release { cause, .. }, Ok(Outcome::Request(_))) =
                (&job.action.command, &result)
            {
                self.shared.released(*cause, 1);
            }
            if let Ok(Outcome::Settled { alerts, .. }) = &result {
                for alert in alerts {
                    self.shared.tell_budget(alert);
                }
            }
            let admit_ids = job.action.admit_ids();
            let admitted = matches!(result, Ok(Outcome::Admitted(_)));
            let heard = job.answer(result);
            if let Some((key, attempt)) = admit_ids.filter(|_| admitted && !heard) {
                self.shared.queue.push(release_unheard(key, attempt));
            }
        }
        self.shared.queue.put_off(put_off);
    }

    /// Keeps the ends of attempts that no caller would repeat. All other jobs are answered as
    /// `Unavailable`.
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

    /// Reopens the backend when it is time to try, and then writes the pending ends.
    pub(super) fn reconnect(&mut self) {
        if self.shared.health.reachable() || Instant::now() < self.next_retry {
            return;
        }
        if self.backend.can_reopen() && self.reopen() {
            self.flush();
        }
        let failed = !self.shared.health.reachable();
        self.retry = if failed { (self.retry * 2).min(LAST_RETRY) } else { FIRST_RETRY };
        self.next_retry = Instant::now() + self.retry;
    }

    fn reopen(&mut self) -> bool {
        let check =
            |source: &dyn AuditSource| self.shared.audit_news(source, &audit::unpaced).map(drop);
        let reopened = panic::catch_unwind(AssertUnwindSafe(|| self.backend.reopen(check)));
        match reopened {
            Ok(Ok(())) => {
                self.shared.health.set_reachable();
                tracing::info!("the ledger is open again");
            }
            Ok(Err(error)) => tracing::error!(%error, "the ledger cannot be reopened"),
            Err(_) => tracing::error!("the database panicked while the ledger was reopened"),
        }
        self.shared.health.reachable()
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
        // Without requests, too, an operator has to learn of it.
        self.look_at_place();
        match panic::catch_unwind(AssertUnwindSafe(|| self.seal().and_then(|()| self.sweep()))) {
            Ok(Ok(true)) => self.next_maintenance = Instant::now(),
            Ok(Ok(false)) => {}
            Ok(Err(StateError::Corrupt(what))) => self.shared.health.distrust(&what),
            Ok(Err(error @ StateError::Io(_))) => self.shared.health.disconnect(&error.to_string()),
            Err(_) => self.shared.health.disconnect("the database panicked"),
        }
    }

    /// Stores what audits have found sound since the last time, or takes over what those of another
    /// node have.
    pub(super) fn seal(&self) -> StateResult {
        if self.shared.others_audit() && self.shared.health.trusted().is_ok() {
            if let Some(seal) = self.backend.seal()? {
                self.shared.learn(seal);
            }
            return Ok(());
        }
        let seal = self.shared.due_seal();
        if seal != self.shared.stored_seal() {
            self.backend.set_seal(seal.as_ref())?;
            self.shared.note_seal(seal);
        }
        Ok(())
    }

    /// A violation has to be looked into, so that the next start must find it again: the seal goes
    /// before the next command, not with the next maintenance.
    fn drop_seal_of_distrusted(&mut self) {
        if let (Err(why), false) = (self.shared.health.trusted(), self.has_recorded_violation) {
            self.has_recorded_violation = self.backend.record_violation(&why).is_ok();
        }
        if self.shared.health.trusted().is_err() && self.shared.stored_seal().is_some() {
            self.next_maintenance = Instant::now();
        }
    }

    /// Audits what is new before an orderly stop, so that the next start has little to read.
    fn seal_at_stop(&self) -> StoreResult {
        let audits = self.shared.knows_audited_part() && !self.shared.others_audit();
        if audits && self.shared.health.trusted().is_ok() {
            let source = self.shared.reader.audit_source()?;
            self.shared.audit_news(&*source, &audit::unpaced)?;
        }
        Ok(self.seal()?)
    }

    /// One sweep; true when more is due. It goes by the clock itself: stored time may be ahead of
    /// the clock, and no request may be forgotten early.
    pub(super) fn sweep(&mut self) -> StateResult<bool> {
        if !self.sweeps {
            return Ok(false);
        }
        self.backend.sweep(self.shared.clock.now(), &self.limits)
    }

    pub(super) fn close(mut self) {
        self.next_retry = Instant::now();
        self.reconnect();
        let clean = self.pending_ends.is_empty();
        if !clean {
            tracing::error!(count = self.pending_ends.len(), "stopped with commands unwritten");
        } else if self.shared.health.reachable() {
            match panic::catch_unwind(AssertUnwindSafe(|| self.seal_at_stop())) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(%error, "the ledger could not be sealed"),
                Err(_) => self.shared.health.disconnect("the database panicked"),
            }
        }
        let close = || self.backend.close(self.shared.boot(), clean);
        match panic::catch_unwind(AssertUnwindSafe(close)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "the stop could not be recorded"),
            Err(_) => tracing::error!(
                "the database panicked while it was closed: the next start checks every page"
            ),
        }
    }
}

/// A job that releases an admission whose caller has gone.
pub(super) fn release_unheard(key: RequestKey, attempt: AttemptId) -> WriteJob {
    let cause = ReleaseCause::TurnedAway(FailureCode::ControlPlaneUnavailable);
    let release = Command::Release { key, attempt, cause };
    WriteJob::new(release.into(), None)
}

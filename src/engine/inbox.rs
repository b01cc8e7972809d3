//! The state that handles and the engine thread share: requests and stops go in, load and
//! statistics come out. The lock is never held during a step, so no caller waits for one. It holds
//! at most `max_rows + max_waiting` sequences.

use super::error::EngineError;
use super::handle::{EngineStats, SequenceEvent};
use super::queue_limits::{self, EngineLoad, Refused};
use super::rate::RateMeter;
use super::scheduler::EngineOptions;
use super::sequence::{GenerateRequest, SequenceId};
use std::collections::HashSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::mpsc::Sender;

/// A request and the channel of its events, which holds `event_capacity()` of them.
pub(super) struct Submission {
    pub request: GenerateRequest,
    pub events: Sender<SequenceEvent>,
}

/// The commands that came in since the engine last took some.
#[derive(Default)]
pub(super) struct Commands {
    pub submitted: Vec<(SequenceId, Submission)>,
    /// Sequences to stop, each with the number of steps launched before the stop came.
    pub stopped: Vec<(SequenceId, u64)>,
    /// Whether the engine thread must end.
    pub end: bool,
}

impl Commands {
    fn is_empty(&self) -> bool {
        self.submitted.is_empty() && self.stopped.is_empty() && !self.end
    }
}

#[derive(Default)]
struct InboxState {
    commands: Commands,
    /// The load that the engine published last, plus what was submitted since.
    load: EngineLoad,
    last_id: u64,
    draining: bool,
    /// Why the engine has ended, if it has.
    closed: Option<EngineError>,
    stats: EngineStats,
    produced: RateMeter,
    /// Sequences that were submitted and have not ended: only these can be stopped.
    live: HashSet<SequenceId>,
}

/// One engine's inbox. Handles and the engine thread hold it together.
pub(super) struct Inbox {
    options: EngineOptions,
    state: Mutex<InboxState>,
    wake: Condvar,
}

impl Inbox {
    pub(super) fn new(options: EngineOptions) -> Self {
        Self { options, state: Mutex::default(), wake: Condvar::new() }
    }

    pub(super) fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Refuses a request, or queues it and wakes the engine. Never waits for a step.
    pub(super) fn submit(
        &self,
        submission: Submission,
        now: Instant,
    ) -> Result<SequenceId, Refused> {
        let request = &submission.request;
        let mut state = self.lock();
        if let Some(reason) = &state.closed {
            return Err(Refused::Dead(reason.clone()));
        }
        if state.draining {
            return Err(Refused::Draining);
        }
        queue_limits::check_size(&self.options, request)?;
        queue_limits::check_wait(&self.options, &state.load, request, now)?;
        state.load.add(request);
        state.last_id += 1;
        let id = SequenceId(state.last_id);
        state.live.insert(id);
        state.commands.submitted.push((id, submission));
        self.wake.notify_one();
        Ok(id)
    }

    /// Asks for the end of a sequence. Unknown ids and those that have ended are ignored.
    pub(super) fn stop(&self, id: SequenceId) {
        let mut state = self.lock();
        // The id is removed, so that a repeated stop adds nothing.
        if state.live.remove(&id) {
            let steps = state.stats.steps;
            state.commands.stopped.push((id, steps));
            self.wake.notify_one();
        }
    }

    /// Refuses new requests from now on.
    pub(super) fn drain(&self) {
        self.lock().draining = true;
    }

    /// Asks the engine thread to end before its next step.
    pub(super) fn ask_to_end(&self) {
        self.lock().commands.end = true;
        self.wake.notify_one();
    }

    /// Returns why the engine thread has ended, if it has.
    pub(super) fn ended_by(&self) -> Option<EngineError> {
        self.lock().closed.clone()
    }

    /// The statistics published last. `waiting` includes requests that the engine has not taken
    /// yet.
    pub(super) fn stats(&self, now: Instant) -> EngineStats {
        let state = self.lock();
        EngineStats {
            waiting: state.stats.waiting + state.commands.submitted.len(),
            tokens_per_second: state.produced.per_second(now),
            ..state.stats.clone()
        }
    }

    /// Takes the commands that have come in. If `idle`, it sleeps until there is one.
    pub(super) fn take(&self, idle: bool) -> Commands {
        let mut state = self.lock();
        while idle && state.commands.is_empty() {
            let woken = self.wake.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::take(&mut state.commands)
    }

    /// Records the engine's remaining work and its statistics. Called after each step.
    pub(super) fn publish(&self, load: EngineLoad, stats: EngineStats, now: Instant) {
        let mut state = self.lock();
        let produced = stats.generated_tokens - state.stats.generated_tokens;
        state.load = load;
        let InboxState { load, commands, .. } = &mut *state;
        for (_, submission) in &commands.submitted {
            load.add(&submission.request);
        }
        state.stats = stats;
        state.produced.record(now, produced);
    }

    /// Notes that a sequence has ended.
    pub(super) fn ended(&self, id: SequenceId) {
        self.lock().live.remove(&id);
    }

    /// Refuses everything from now on, for this reason. Returns the commands that the engine has
    /// not taken.
    pub(super) fn close(&self, reason: &EngineError) -> Commands {
        let mut state = self.lock();
        state.closed = Some(reason.clone());
        state.live.clear();
        state.stats = EngineStats::default();
        std::mem::take(&mut state.commands)
    }

    fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

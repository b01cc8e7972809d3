//! Between the handles and the engine thread: requests and stops in, load and statistics out. The
//! lock is held for moments only, never during a step; what it guards is bounded by `max_rows +
//! max_waiting` sequences.

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

pub struct Submission {
    pub request: GenerateRequest,
    pub events: Sender<SequenceEvent>,
}

/// What came in since the engine looked last.
#[derive(Default)]
pub struct Commands {
    pub submitted: Vec<(SequenceId, Submission)>,
    /// With the number of steps there had been when the stop came.
    pub stopped: Vec<(SequenceId, u64)>,
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
    /// As of the last look, plus what was submitted since.
    load: EngineLoad,
    last_id: u64,
    draining: bool,
    /// Why nothing is taken any more.
    closed: Option<EngineError>,
    stats: EngineStats,
    produced: RateMeter,
    /// Sequences the engine has taken and not ended: the only ones worth stopping.
    live: HashSet<SequenceId>,
}

pub struct Inbox {
    options: EngineOptions,
    state: Mutex<InboxState>,
    wake: Condvar,
}

impl Inbox {
    pub fn new(options: EngineOptions) -> Self {
        Self { options, state: Mutex::default(), wake: Condvar::new() }
    }

    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    pub fn submit(&self, submission: Submission, now: Instant) -> Result<SequenceId, Refused> {
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

    pub fn stop(&self, id: SequenceId) {
        let mut state = self.lock();
        // Removed, so that a repeated stop adds nothing.
        if state.live.remove(&id) {
            let steps = state.stats.steps;
            state.commands.stopped.push((id, steps));
            self.wake.notify_one();
        }
    }

    pub fn drain(&self) {
        self.lock().draining = true;
    }

    pub fn ask_to_end(&self) {
        self.lock().commands.end = true;
        self.wake.notify_one();
    }

    pub fn ended_by(&self) -> Option<EngineError> {
        self.lock().closed.clone()
    }

    pub fn stats(&self, now: Instant) -> EngineStats {
        let state = self.lock();
        EngineStats {
            waiting: state.stats.waiting + state.commands.submitted.len(),
            tokens_per_second: state.produced.per_second(now),
            ..state.stats.clone()
        }
    }

    /// Takes what has come in. With `idle` it sleeps until there is something.
    pub fn take(&self, idle: bool) -> Commands {
        let mut state = self.lock();
        while idle && state.commands.is_empty() {
            let woken = self.wake.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::take(&mut state.commands)
    }

    /// After each step: what the engine has to do, and what it has done.
    pub fn publish(&self, load: EngineLoad, stats: EngineStats, now: Instant) {
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

    pub fn ended(&self, id: SequenceId) {
        self.lock().live.remove(&id);
    }

    /// Nothing is taken from now on. Returns what nobody will look at.
    pub fn close(&self, reason: &EngineError) -> Commands {
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

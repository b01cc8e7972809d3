//! The state that handles and the engine thread share, and the engine's side of it: requests and
//! stops are taken, load and statistics are published. The lock is never held during a step, so no
//! caller waits for one. What it guards is bounded by `max_rows + max_waiting` sequences.

use super::error::EngineError;
use super::handle::{EngineStats, SequenceEvent};
use super::queue_limits::EngineLoad;
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
pub(super) struct InboxState {
    pub commands: Commands,
    /// The load that the engine published last, plus what was submitted since.
    pub load: EngineLoad,
    pub last_id: u64,
    pub draining: bool,
    /// Why the engine has ended, if it has.
    pub closed: Option<EngineError>,
    pub stats: EngineStats,
    pub produced: RateMeter,
    /// Sequences that were submitted and have not ended: only these can be stopped.
    pub live: HashSet<SequenceId>,
}

/// One engine's inbox. Handles and the engine thread hold it together.
pub(super) struct Inbox {
    pub options: EngineOptions,
    state: Mutex<InboxState>,
    /// Wakes the engine thread where it sleeps in `take`.
    pub wake: Condvar,
}

impl Inbox {
    pub(super) fn new(options: EngineOptions) -> Self {
        Self { options, state: Mutex::default(), wake: Condvar::new() }
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

    pub(super) fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

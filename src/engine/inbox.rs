//! The state that handles and the engine thread share, and the engine's side of it: requests and
//! stops are taken, load, statistics and progress are published. The lock is never held during a
//! step, so no caller waits for one. What it guards is bounded by `max_rows + max_waiting`
//! sequences.

use super::error::EngineError;
use super::handle::{EngineStats, SequenceEvent};
use super::queue_limits::EngineLoad;
use super::rate::RateMeter;
use super::scheduler::EngineOptions;
use super::sequence::{GenerateRequest, SequenceId};
use parking_lot::{Condvar, Mutex};
use std::collections::HashSet;
use std::fmt;
use std::time::Instant;
use tokio::sync::mpsc::Sender;

/// A request and the channel of its events, which holds `event_capacity()` of them.
pub(super) struct Submission {
    pub request: GenerateRequest,
    pub events: Sender<SequenceEvent>,
}

/// What the engine thread is doing. Each phase lasts for a part of one step, except waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EnginePhase {
    /// There is nothing to do.
    #[default]
    Waiting,
    Scheduling,
    /// The runner is asked to begin a step with so many sequences.
    Launching {
        sequences: usize,
    },
    /// The runner's results of a step with so many sequences are awaited.
    Collecting {
        sequences: usize,
    },
    /// The runner drops what it had begun, after a step that failed.
    Recovering,
}

impl fmt::Display for EnginePhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waiting => f.write_str("waiting for work"),
            Self::Scheduling => f.write_str("scheduling a step"),
            Self::Launching { sequences } => {
                write!(f, "launching a step with {sequences} sequences")
            }
            Self::Collecting { sequences } => {
                write!(f, "collecting the results of a step with {sequences} sequences")
            }
            Self::Recovering => f.write_str("recovering from a failed step"),
        }
    }
}

/// How far the engine thread has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineProgress {
    pub phase: EnginePhase,
    /// Steps that have ended, with results or with a failure.
    pub ended_steps: u64,
    /// Sequences that were submitted and have not ended.
    pub sequences: usize,
    /// Whether there is anything for the engine thread to do.
    pub has_work: bool,
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
    pub phase: EnginePhase,
    pub ended_steps: u64,
    pub produced: RateMeter,
    /// Sequences that were submitted and have not ended: only these can be stopped.
    pub live: HashSet<SequenceId>,
}

/// One engine's inbox. Handles and the engine thread hold it together.
pub(super) struct Inbox {
    pub options: EngineOptions,
    pub state: Mutex<InboxState>,
    /// Wakes the engine thread where it sleeps in `take`.
    pub wake: Condvar,
}

impl Inbox {
    pub(super) fn new(options: EngineOptions) -> Self {
        Self { options, state: Mutex::default(), wake: Condvar::new() }
    }

    /// Takes the commands that have come in. If `idle`, it sleeps until there is one.
    pub(super) fn take(&self, idle: bool) -> Commands {
        let mut state = self.state.lock();
        if idle && state.commands.is_empty() {
            state.phase = EnginePhase::Waiting;
        }
        while idle && state.commands.is_empty() {
            self.wake.wait(&mut state);
        }
        state.phase = EnginePhase::Scheduling;
        std::mem::take(&mut state.commands)
    }

    /// Notes what the engine thread does next.
    pub(super) fn enter(&self, phase: EnginePhase) {
        self.state.lock().phase = phase;
    }

    /// Notes that the oldest step in flight has ended.
    pub(super) fn step_ended(&self) {
        let mut state = self.state.lock();
        state.ended_steps += 1;
        state.phase = EnginePhase::Scheduling;
    }

    pub(super) fn progress(&self) -> EngineProgress {
        let state = self.state.lock();
        let at_work = state.phase != EnginePhase::Waiting || !state.commands.is_empty();
        EngineProgress {
            phase: state.phase,
            ended_steps: state.ended_steps,
            sequences: state.live.len(),
            has_work: at_work && state.closed.is_none(),
        }
    }

    /// Records the engine's remaining work and its statistics. Called after each step.
    pub(super) fn publish(&self, load: EngineLoad, stats: EngineStats, now: Instant) {
        let mut state = self.state.lock();
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
        self.state.lock().live.remove(&id);
    }

    /// Refuses everything from now on, for this reason. Returns the commands that the engine has
    /// not taken.
    pub(super) fn close(&self, reason: &EngineError) -> Commands {
        let mut state = self.state.lock();
        state.closed = Some(reason.clone());
        state.live.clear();
        state.stats = EngineStats::default();
        std::mem::take(&mut state.commands)
    }
}

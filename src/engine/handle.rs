//! The engine as the rest of the node uses it: requests go in through a bounded queue, the inbox,
//! and events come out of a bounded channel for each sequence. The engine thread takes requests and
//! stops from the inbox and publishes load, statistics and progress there.

#![expect(clippy::disallowed_methods, reason = "the handle passes the time to the pure parts")]

use super::draft_model::DraftModel;
use super::error::EngineError;
use super::queue_limits::{self, EngineLoad, Refused};
use super::rate::RateMeter;
use super::runner::Runner;
use super::scheduler::EngineOptions;
use super::sequence::{Finished, GenerateRequest, SequenceId};
use super::worker::Worker;
use cresset_base::EngineStats;
use cresset_kernels::sampling::params::TokenLogprobs;
use parking_lot::{Condvar, Mutex};
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::mpsc;

/// One event of a sequence. Its reader gets them in this order: `Started` at most once, a `Token`
/// for each token, and `Finished`.
#[derive(Clone, Debug, PartialEq)]
pub enum SequenceEvent {
    /// The first chunk of the prompt was scheduled.
    Started,
    Token {
        id: u32,
        logprobs: Option<TokenLogprobs>,
    },
    /// Always the last event, exactly once.
    Finished(Finished),
}

/// What the engine thread is doing. Each phase lasts for a part of one step, except waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EnginePhase {
    /// There is nothing to do.
    #[default]
    Waiting,
    Scheduling,
    /// The runner is asked to begin a step.
    Launching {
        sequences: usize,
    },
    /// The grammars of a step are asked, and its sampler is launched.
    Sampling {
        rows: usize,
    },
    /// The runner's results of a step are awaited.
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
            Self::Sampling { rows } => write!(f, "asking the grammars of a step with {rows} rows"),
            Self::Collecting { sequences } => {
                write!(f, "collecting the results of a step with {sequences} sequences")
            }
            Self::Recovering => f.write_str("recovering from a failed step"),
        }
    }
}

/// Tells what the engine thread is doing, and how many steps it has ended.
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

/// Access to one engine; cheap to clone. The engine thread ends when `shutdown` is called or the
/// last handle is dropped.
#[derive(Clone)]
pub struct EngineHandle {
    engine: Arc<EngineThread>,
}

struct EngineThread {
    inbox: Arc<Inbox>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Dropping the last handle does not wait for the thread, because handles are dropped in async
/// code.
impl Drop for EngineThread {
    fn drop(&mut self) {
        self.ask_to_end();
    }
}

impl EngineThread {
    /// Asks the thread to end before its next step.
    fn ask_to_end(&self) {
        self.inbox.state.lock().commands.end = true;
        self.inbox.wake.notify_one();
    }
}

impl EngineHandle {
    /// Starts the engine thread around a runner.
    pub fn start(runner: Box<dyn Runner>, options: EngineOptions) -> Self {
        Self::start_with(runner, None, options)
    }

    /// Starts it with a smaller model beside the runner, which guesses tokens.
    pub fn start_with(
        runner: Box<dyn Runner>,
        draft_model: Option<DraftModel>,
        options: EngineOptions,
    ) -> Self {
        let inbox = Arc::new(Inbox::new(options));
        let worker = Worker::new(runner, draft_model, Arc::clone(&inbox));
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || worker.run())
            .expect("the operating system gives the engine a thread");
        let engine = EngineThread { inbox, thread: Mutex::new(Some(thread)) };
        Self { engine: Arc::new(engine) }
    }

    /// Submits a request, or refuses it. Never blocks. The channel holds every event of the
    /// sequence, so the engine never waits for a slow reader. Dropping the receiver is the same as
    /// `stop`.
    pub fn submit(
        &self,
        request: GenerateRequest,
    ) -> Result<(SequenceId, mpsc::Receiver<SequenceEvent>), Refused> {
        let (events, receiver) = mpsc::channel(request.event_capacity());
        Ok((self.submit_to(request, events)?, receiver))
    }

    /// Submits like `submit`, with the caller's own channel, which must hold
    /// `request.event_capacity()` events: the engine panics when it is full.
    pub fn submit_to(
        &self,
        request: GenerateRequest,
        events: mpsc::Sender<SequenceEvent>,
    ) -> Result<SequenceId, Refused> {
        let Inbox { options, wake, .. } = &*self.engine.inbox;
        let mut state = self.engine.inbox.state.lock();
        if let Some(reason) = &state.closed {
            return Err(Refused::Dead(reason.clone()));
        }
        if state.draining {
            return Err(Refused::Draining);
        }
        queue_limits::check_size(options, &request)?;
        queue_limits::check_wait(options, &state.load, &request, Instant::now())?;
        state.load.add(&request);
        state.last_id += 1;
        let id = SequenceId(state.last_id);
        state.live.insert(id);
        state.commands.submitted.push((id, Submission { request, events }));
        wake.notify_one();
        Ok(id)
    }

    /// Ends a sequence before the next step; its `Finished` follows. Unknown ids and those that
    /// have ended are ignored.
    pub fn stop(&self, id: SequenceId) {
        let mut state = self.engine.inbox.state.lock();
        // The id is removed, so that a repeated stop adds nothing.
        if state.live.remove(&id) {
            let steps = state.stats.steps;
            state.commands.stopped.push((id, steps));
            self.engine.inbox.wake.notify_one();
        }
    }

    /// The engine's numbers after its last step. `waiting` includes what the engine has not taken
    /// yet.
    pub fn stats(&self) -> EngineStats {
        let state = self.engine.inbox.state.lock();
        EngineStats {
            waiting: state.stats.waiting + state.commands.submitted.len(),
            tokens_per_second: state.produced.per_second(Instant::now()),
            ..state.stats.clone()
        }
    }

    /// How far the engine thread has come, told by what it wrote down itself.
    pub fn progress(&self) -> EngineProgress {
        let state = self.engine.inbox.state.lock();
        let at_work = state.phase != EnginePhase::Waiting || !state.commands.is_empty();
        EngineProgress {
            phase: state.phase,
            ended_steps: state.ended_steps,
            sequences: state.live.len(),
            has_work: at_work && state.closed.is_none(),
        }
    }

    /// The limits that the engine was started with.
    pub fn options(&self) -> &EngineOptions {
        &self.engine.inbox.options
    }

    /// Returns why the engine thread has ended, if it has.
    pub fn ended_by(&self) -> Option<EngineError> {
        self.engine.inbox.state.lock().closed.clone()
    }

    /// Refuses new sequences from now on; running ones go on, but for those in the background.
    pub fn drain(&self) {
        let mut state = self.engine.inbox.state.lock();
        state.draining = true;
        state.commands.end_background = true;
    }

    /// Whether it takes no new sequences any more.
    pub fn is_closing(&self) -> bool {
        let state = self.engine.inbox.state.lock();
        state.draining || state.closed.is_some()
    }

    /// Ends the engine thread before its next step and waits for it, which blocks for one step at
    /// most. Sequences that still run fail.
    pub fn shutdown(&self) {
        self.engine.ask_to_end();
        let thread = &self.engine.thread;
        let mut thread = thread.lock();
        if let Some(thread) = thread.take() {
            // The thread catches its panics and reports them through `ended_by` and the sequences'
            // events.
            let _ = thread.join();
        }
    }
}

/// A request and the channel of its events, which holds `event_capacity()` of them.
pub(super) struct Submission {
    pub request: GenerateRequest,
    pub events: mpsc::Sender<SequenceEvent>,
}

/// The commands that came in since the engine last took some.
#[derive(Default)]
pub(super) struct Commands {
    pub submitted: Vec<(SequenceId, Submission)>,
    /// Sequences to stop, each with the number of steps launched before the stop came.
    pub stopped: Vec<(SequenceId, u64)>,
    /// Whether what runs in the background ends.
    pub end_background: bool,
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

/// What the handles of one engine and its thread share. The lock is never held during a step, so no
/// caller waits for one. What it guards is bounded by `max_rows + max_waiting` sequences.
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

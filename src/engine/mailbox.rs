//! Between the handles and the engine thread: requests and stops in, load and statistics out. The
//! lock is held for moments only, never during a step; what it guards is bounded by `max_rows +
//! max_waiting` sequences.

use super::error::EngineError;
use super::handle::{EngineStats, Event};
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
    pub events: Sender<Event>,
}

/// What came in since the engine looked last.
#[derive(Default)]
pub struct Mail {
    pub submitted: Vec<(SequenceId, Submission)>,
    /// With the number of steps there had been when the stop came.
    pub stopped: Vec<(SequenceId, u64)>,
    pub end: bool,
}

impl Mail {
    fn is_empty(&self) -> bool {
        self.submitted.is_empty() && self.stopped.is_empty() && !self.end
    }
}

#[derive(Default)]
struct Inbox {
    mail: Mail,
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

pub struct Mailbox {
    options: EngineOptions,
    inbox: Mutex<Inbox>,
    wake: Condvar,
}

impl Mailbox {
    pub fn new(options: EngineOptions) -> Self {
        Self { options, inbox: Mutex::default(), wake: Condvar::new() }
    }

    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    pub fn submit(&self, submission: Submission, now: Instant) -> Result<SequenceId, Refused> {
        let request = &submission.request;
        let mut inbox = self.lock();
        if let Some(reason) = &inbox.closed {
            return Err(Refused::Dead(reason.clone()));
        }
        if inbox.draining {
            return Err(Refused::Draining);
        }
        queue_limits::check_size(&self.options, request)?;
        queue_limits::check_wait(&self.options, &inbox.load, request, now)?;
        inbox.load.add(request);
        inbox.last_id += 1;
        let id = SequenceId(inbox.last_id);
        inbox.live.insert(id);
        inbox.mail.submitted.push((id, submission));
        self.wake.notify_one();
        Ok(id)
    }

    pub fn stop(&self, id: SequenceId) {
        let mut inbox = self.lock();
        // Removed, so that a repeated stop adds nothing.
        if inbox.live.remove(&id) {
            let steps = inbox.stats.steps;
            inbox.mail.stopped.push((id, steps));
            self.wake.notify_one();
        }
    }

    pub fn drain(&self) {
        self.lock().draining = true;
    }

    pub fn ask_to_end(&self) {
        self.lock().mail.end = true;
        self.wake.notify_one();
    }

    pub fn ended_by(&self) -> Option<EngineError> {
        self.lock().closed.clone()
    }

    pub fn stats(&self, now: Instant) -> EngineStats {
        let inbox = self.lock();
        EngineStats {
            waiting: inbox.stats.waiting + inbox.mail.submitted.len(),
            tokens_per_second: inbox.produced.per_second(now),
            ..inbox.stats.clone()
        }
    }

    /// Takes what has come in. With `idle` it sleeps until there is something.
    pub fn take(&self, idle: bool) -> Mail {
        let mut inbox = self.lock();
        while idle && inbox.mail.is_empty() {
            let woken = self.wake.wait(inbox);
            inbox = woken.unwrap_or_else(PoisonError::into_inner);
        }
        std::mem::take(&mut inbox.mail)
    }

    /// After each step: what the engine has to do, and what it has done.
    pub fn publish(&self, load: EngineLoad, stats: EngineStats, now: Instant) {
        let mut inbox = self.lock();
        let produced = stats.generated_tokens - inbox.stats.generated_tokens;
        inbox.load = load;
        let Inbox { load, mail, .. } = &mut *inbox;
        for (_, submission) in &mail.submitted {
            load.add(&submission.request);
        }
        inbox.stats = stats;
        inbox.produced.record(now, produced);
    }

    pub fn ended(&self, id: SequenceId) {
        self.lock().live.remove(&id);
    }

    /// Nothing is taken from now on. Returns what nobody will look at.
    pub fn close(&self, reason: &EngineError) -> Mail {
        let mut inbox = self.lock();
        inbox.closed = Some(reason.clone());
        inbox.live.clear();
        inbox.stats = EngineStats::default();
        std::mem::take(&mut inbox.mail)
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

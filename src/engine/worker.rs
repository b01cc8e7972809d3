//! The engine thread: it repeats `schedule → launch → collect → commit` and sleeps when there is
//! nothing to do. With a runner of depth 2 it launches the next step before it collects the results
//! of the last one, so that the host works while the device computes. The grammars of the next step
//! are asked then, too: it is sampled when the last one's tokens are known.

#![expect(
    clippy::disallowed_methods,
    reason = "the engine thread passes the time to its pure parts"
)]

use super::batch::{forward_batch, known_rows};
use super::draft_model::DraftModel;
use super::error::EngineError;
use super::handle::{Commands, EnginePhase, Inbox, SequenceEvent};
use super::own_guesses::OwnHead;
use super::panics::{catch_panic, panicked};
use super::queue_limits::{EngineLoad, FoundShare};
use super::rate::Throughput;
use super::runner::{RowResult, Runner};
use super::scheduler::{ScheduledStep, Scheduler, StepRow};
use super::sequence::{Finished, Sequence, SequenceId, SequenceState, StopCause};
use super::speculation::{DraftCost, Proposer};
use cresset_base::{EngineStats, failpoint};
use cresset_kernels::sampling::params::{RowSampling, Sampled};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Sender;

pub(super) struct Worker {
    runner: Box<dyn Runner>,
    /// A smaller model that guesses tokens.
    draft_model: Option<DraftModel>,
    /// That of the model's own head.
    head_cost: DraftCost,
    scheduler: Scheduler,
    /// The event channels of the live sequences.
    streams: HashMap<SequenceId, Sender<SequenceEvent>>,
    inbox: Arc<Inbox>,
    throughput: Throughput,
    /// Whether the step launched last waits to be sampled.
    awaits_masks: bool,
    /// That of steps with prompts alone.
    prompt_throughput: Throughput,
    found: FoundShare,
    /// When the runner began with the oldest step in flight.
    busy_since: Instant,
    /// How long it took to schedule that step, guesses included.
    scheduling: Duration,
    /// `steps`, `stops` and `late_frees` are counted here; the other fields stay 0.
    counts: EngineStats,
}

/// Most steps that may be launched between the call of `EngineHandle::stop` and the moment at which
/// the sequence's blocks are free. More count as a late free, which a sound engine never has.
const MAX_STEPS_TO_FREE_BLOCKS: u64 = 2;

impl Worker {
    pub(super) fn new(
        runner: Box<dyn Runner>,
        draft_model: Option<DraftModel>,
        inbox: Arc<Inbox>,
    ) -> Self {
        let mut options = inbox.options.clone();
        if runner.depth() > 1 {
            options.speculative_tokens = 0;
        }
        let scheduler = Scheduler::new(options, boot_secret());
        let worker = Self {
            runner,
            draft_model,
            head_cost: DraftCost::default(),
            scheduler,
            streams: HashMap::new(),
            inbox,
            throughput: Throughput::default(),
            awaits_masks: false,
            prompt_throughput: Throughput::default(),
            found: FoundShare::default(),
            busy_since: Instant::now(),
            scheduling: Duration::ZERO,
            counts: EngineStats::default(),
        };
        worker.publish();
        worker
    }

    /// Runs until it is told to end, or until an error or a panic ends it. In each case every live
    /// sequence gets its `Finished`.
    pub(super) fn run(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let reason = match outcome {
            Ok(Ok(())) => EngineError::ShutDown,
            Ok(Err(reason)) => reason,
            Err(panic) => panicked(panic.as_ref()),
        };
        match &reason {
            EngineError::ShutDown => tracing::info!(%reason, "the engine has stopped"),
            error => tracing::error!(kind = error.kind(), %reason, "the engine has stopped"),
        }
        self.close(&reason);
    }

    fn serve(&mut self) -> Result<(), EngineError> {
        loop {
            let idle = self.scheduler.is_empty() && self.scheduler.in_flight().is_empty();
            if idle {
                self.check_integrity()?;
            }
            let commands = self.inbox.take(idle);
            if commands.end {
                self.apply_commands(commands);
                return Ok(());
            }
            self.apply_commands(commands);
            self.stop_unread();
            let now = Instant::now();
            for id in self.scheduler.past_deadline(now) {
                self.finish(id, StopCause::DeadlineExceeded);
            }
            self.step(now)?;
            self.publish();
        }
    }

    /// Notes how much of a new prompt was in the prefix cache. The background does not count.
    fn note_found(&mut self, id: SequenceId) {
        let added = self.scheduler.get(id).filter(|added| !added.request.background);
        if let Some(added) = added {
            self.found.note(added.expected_in_cache, added.tokens.len());
        }
    }

    fn apply_commands(&mut self, commands: Commands) {
        for (id, submission) in commands.submitted {
            self.streams.insert(id, submission.events);
            self.scheduler.add(id, submission.request);
            self.note_found(id);
        }
        for (id, asked_at) in commands.stopped {
            if self.finish(id, StopCause::Stopped) {
                self.counts.stops += 1;
                let late = self.counts.steps - asked_at > MAX_STEPS_TO_FREE_BLOCKS;
                self.counts.late_frees += u64::from(late);
            }
        }
        if commands.end_background {
            for id in self.scheduler.in_background() {
                self.finish(id, StopCause::Stopped);
            }
        }
    }

    /// Stops the sequences whose reader has dropped its end of the channel.
    fn stop_unread(&mut self) {
        let gone: Vec<_> = self
            .streams
            .iter()
            .filter(|(_, events)| events.is_closed())
            .map(|(&id, _)| id)
            .collect();
        for id in gone {
            self.finish(id, StopCause::Stopped);
        }
    }

    /// Launches the next step, if there is anything to compute, and collects the oldest one, unless
    /// the runner can take another launch before that. An error ends the engine.
    fn step(&mut self, now: Instant) -> Result<(), EngineError> {
        let guesses = self.runner.guesses();
        let mut head = OwnHead { runner: &mut *self.runner, cost: &mut self.head_cost };
        let proposer = match &mut self.draft_model {
            Some(model) => Some(model as &mut dyn Proposer),
            None => guesses.then_some(&mut head as &mut dyn Proposer),
        };
        let step = self.scheduler.schedule_with(proposer);
        self.scheduling = now.elapsed();
        if self.scheduler.in_flight().is_empty() {
            let fault = "no sequence can go on, which is a fault of the scheduler";
            let fault = Err(EngineError::Integrity(fault.into()));
            return if self.scheduler.is_empty() { Ok(()) } else { fault };
        }
        for &id in &step.started {
            self.send(id, SequenceEvent::Started);
        }
        let launched = if step.rows.is_empty() { Ok(()) } else { self.launch(&step, now) };
        let more = !step.rows.is_empty() && self.scheduler.in_flight().len() < self.runner.depth();
        let outcome = launched
            .and_then(|()| if more { Ok(()) } else { self.collect() })
            .and_then(|()| self.sample());
        outcome.or_else(|error| self.fail(&error))
    }

    fn launch(&mut self, step: &ScheduledStep, now: Instant) -> Result<(), EngineError> {
        self.counts.steps += 1;
        let first = self.scheduler.in_flight().len() == 1;
        if first {
            self.busy_since = now;
        }
        let (batch, rows) = forward_batch(&self.scheduler, step);
        self.inbox.enter(EnginePhase::Launching { sequences: step.rows.len() });
        let launched = catch_panic(|| {
            failpoint!("engine::crash");
            failpoint!("engine::device", |_| Err(EngineError::DeviceLost("a GPU was lost".into())));
            failpoint!("engine::step", |_| Err(EngineError::Compute("a step failed".into())));
            self.runner.launch(&batch, &rows)
        });
        self.awaits_masks = launched.is_ok() && rows.iter().any(RowSampling::awaits_mask);
        if launched.is_err() && !first {
            // The step launched before it did not fail: its tokens count.
            self.collect()?;
        }
        launched
    }

    /// Lets the step in flight be sampled if its grammars waited for the one before, which is
    /// committed by now.
    fn sample(&mut self) -> Result<(), EngineError> {
        if !std::mem::take(&mut self.awaits_masks) {
            return Ok(());
        }
        let rows = known_rows(&self.scheduler);
        self.inbox.enter(EnginePhase::Sampling { rows: rows.len() });
        catch_panic(|| self.runner.sample(&rows))
    }

    /// Waits for the results of the oldest step in flight and commits them.
    fn collect(&mut self) -> Result<(), EngineError> {
        let sequences = self.scheduler.in_flight().front().map_or(0, Vec::len);
        self.inbox.enter(EnginePhase::Collecting { sequences });
        let results = catch_panic(|| self.runner.collect())?;
        let oldest = self.scheduler.in_flight().front().into_iter().flatten();
        let (found, wanted) = (results.len(), oldest.map(StepRow::results).sum::<usize>());
        if found != wanted {
            let text = format!("the runner gave {found} results where {wanted} were asked for");
            return Err(EngineError::Shape(text));
        }
        self.inbox.step_ended();
        let rows = self.scheduler.commit_step();
        let now = Instant::now();
        let spent = now - std::mem::replace(&mut self.busy_since, now);
        // Guesses have a price of their own. Without a second step in flight, `spent` began with
        // them.
        self.scheduler.note_cost(&rows, spent.saturating_sub(self.scheduling));
        let accepted = self.scheduler.totals().accepted_tokens;
        let mut results = results.into_iter();
        for row in &rows {
            self.commit_row(row.id, results.by_ref().take(row.results()));
        }
        let accepted = (self.scheduler.totals().accepted_tokens - accepted) as usize;
        let computed = rows.iter().map(|row| row.num_tokens).sum::<usize>() + accepted;
        self.throughput.record(computed, spent);
        if rows.iter().any(|row| !row.decodes()) {
            self.prompt_throughput.record(computed, spent);
        }
        Ok(())
    }

    /// Takes over a row's results, up to the first that does not follow from the one before: each
    /// draft that was not drawn makes the rest of them void.
    fn commit_row(&mut self, id: SequenceId, mut results: impl Iterator<Item = RowResult>) {
        // A sequence may have ended while the step was in flight. Its tokens are then neither sent
        // nor counted, so they are not charged either.
        while self.scheduler.awaits(id)
            && let Some(result) = results.next()
        {
            match result {
                Ok(sampled) => self.append(id, sampled),
                Err(error) => {
                    let kind = error.kind();
                    // What a client asked for is no fault of the node.
                    if let EngineError::Grammar(_) = error {
                        tracing::info!(sequence = id.0, reason = %error, "a format ended its answer");
                    } else {
                        tracing::error!(sequence = id.0, kind, reason = %error, "a row failed");
                    }
                    self.finish(id, StopCause::Failed(error));
                }
            }
        }
        // The caller's iterator goes on with the next row.
        results.for_each(drop);
    }

    fn append(&mut self, id: SequenceId, sampled: Sampled) {
        let Sampled { token, logprobs } = sampled;
        let cause = self.scheduler.append(id, token);
        self.send(id, SequenceEvent::Token { id: token, logprobs });
        if let Some(cause) = cause {
            self.finish(id, cause);
        }
    }

    /// Ends the sequences of a failed step and of those launched after it, and lets the runner
    /// recover. An error means that it could not.
    fn fail(&mut self, error: &EngineError) -> Result<(), EngineError> {
        tracing::error!(step = self.counts.steps, kind = error.kind(), reason = %error, "a step failed");
        for id in self.scheduler.drop_steps_in_flight() {
            self.finish(id, StopCause::Failed(error.clone()));
        }
        self.inbox.enter(EnginePhase::Recovering);
        // A lost device answers no further call.
        let lost = error.is_device_lost().then(|| error.clone());
        let recovered = lost.map_or_else(|| catch_panic(|| self.runner.recover()), Err);
        self.inbox.step_ended();
        recovered
    }

    /// Ends a sequence and frees its blocks. False when it had ended before.
    fn finish(&mut self, id: SequenceId, cause: StopCause) -> bool {
        let finished = self.scheduler.finish(id, cause);
        if let Some(model) = &mut self.draft_model {
            model.forget(id);
        }
        let found = finished.is_some();
        if let Some(finished) = finished {
            self.end_stream(id, finished);
        }
        found
    }

    fn end_stream(&mut self, id: SequenceId, finished: Finished) {
        self.send(id, SequenceEvent::Finished(finished));
        self.streams.remove(&id);
        self.inbox.ended(id);
    }

    fn send(&self, id: SequenceId, event: SequenceEvent) {
        use tokio::sync::mpsc::error::TrySendError;
        // A closed channel is found by `stop_unread` before the next step.
        if let Some(Err(TrySendError::Full(_))) = self.streams.get(&id).map(|s| s.try_send(event)) {
            panic!("the channel of {id:?} is full: it got more events than `event_capacity` says");
        }
    }

    fn check_integrity(&self) -> Result<(), EngineError> {
        self.scheduler.check_integrity().map_err(|error| EngineError::Integrity(error.to_string()))
    }

    fn publish(&self) {
        self.inbox.publish(self.load(), self.stats(), Instant::now());
    }

    fn load(&self) -> EngineLoad {
        let context = self.scheduler.options().max_context;
        let mut load = EngineLoad {
            prompt_tokens_per_second: self.prompt_throughput.per_second(),
            tokens_per_second: self.throughput.per_second(),
            found_share: self.found.share(),
            ..EngineLoad::default()
        };
        let foreground = |sequence: &&Sequence| !sequence.request.background;
        for sequence in self.scheduler.sequences().filter(foreground) {
            load.live += 1;
            load.prompt_tokens += sequence.expected_work();
            if sequence.state == SequenceState::Waiting {
                load.output_tokens += sequence.remaining(context);
            }
        }
        load
    }

    fn stats(&self) -> EngineStats {
        let totals = self.scheduler.totals();
        EngineStats {
            running: self.scheduler.num_running(),
            waiting: self.scheduler.num_waiting(),
            blocks_total: self.scheduler.blocks().total(),
            blocks_used: self.scheduler.blocks().used(),
            prompt_tokens: totals.prompt_tokens,
            generated_tokens: totals.generated_tokens,
            prefix_hit_tokens: totals.prefix_hit_tokens,
            preemptions: totals.preemptions,
            draft_tokens: totals.draft_tokens,
            accepted_tokens: totals.accepted_tokens,
            ..self.counts.clone()
        }
    }

    /// Ends every sequence, those included that were never added to the scheduler. After a panic
    /// the scheduler may be in any state, so it is only read here.
    fn close(mut self, reason: &EngineError) {
        let commands = self.inbox.close(reason);
        let failed = || StopCause::Failed(EngineError::Stopped(Box::new(reason.clone())));
        let ended: Vec<_> = self
            .scheduler
            .sequences()
            .map(|sequence| (sequence.id, sequence.finished(failed())))
            .collect();
        for (id, finished) in ended {
            self.end_stream(id, finished);
        }
        for (id, submission) in commands.submitted {
            self.streams.insert(id, submission.events);
            let finished = Finished {
                cause: failed(),
                prompt_tokens: 0,
                cached_tokens: 0,
                completion_tokens: 0,
            };
            self.end_stream(id, finished);
        }
    }
}

/// Draws the seed of the prefix cache's hashes. Unpredictable hashes keep clients from aiming at
/// one another's cache blocks.
fn boot_secret() -> [u8; 32] {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).expect("the operating system gives random bytes");
    secret
}

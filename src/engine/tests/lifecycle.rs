//! Sequences join, leave, stop and fail; engines refuse, drain, fail and shut down.

use super::*;
use crate::runner::{RowResult, Runner};
use crate::testing::{ScriptedFailure, ScriptedRunner};
use cresset_kernels::sampling::params::RowSampling;
use cresset_models::ForwardBatch;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;

/// Numbers of steps in flight: one at a time, and one ahead.
const DEPTHS: [usize; 2] = [1, 2];

fn start(runner: ScriptedRunner) -> EngineHandle {
    EngineHandle::start(Box::new(runner), options())
}

/// An engine whose every token waits for a permit and is the permit's number. Once the sender is
/// dropped every token is 999.
fn gated(depth: usize) -> (EngineHandle, SyncSender<u32>) {
    let (permits, gate) = std::sync::mpsc::sync_channel(1_000);
    let script = move |_: &RowSampling| gate.recv().unwrap_or(999);
    (start(ScriptedRunner::new(script).depth(depth)), permits)
}

fn idle(engine: &EngineHandle) {
    wait_for(engine, "idle", |stats| stats.running + stats.waiting + stats.blocks_used == 0);
}

#[test]
fn a_sequence_produces_its_script_and_counts_it() {
    for depth in DEPTHS {
        let engine = start(ScriptedRunner::repeating(vec![7, 8, 9]).depth(depth));
        let (_, events) = engine.submit(request(0..10, 5)).unwrap();
        let (tokens, finished) = collect(events);
        assert_eq!(tokens, [7, 8, 9, 7, 8]);
        assert_eq!(
            finished,
            Finished {
                cause: StopCause::Length,
                prompt_tokens: 10,
                cached_tokens: 0,
                completion_tokens: 5
            }
        );
        idle(&engine);
        let stats = engine.stats();
        assert_eq!((stats.prompt_tokens, stats.generated_tokens, stats.steps), (10, 5, 5));
        assert!(stats.tokens_per_second > 0.0);
        let (_, events) = engine.submit(request(0..10, 1)).unwrap();
        assert_eq!(collect(events).1.cached_tokens, 8);
    }
}

#[test]
fn the_end_of_text_is_a_token_and_waits_for_min_tokens() {
    for depth in DEPTHS {
        let script = |row: &RowSampling| if row.banned.contains(&2) { 1 } else { 2 };
        let engine = start(ScriptedRunner::new(script).depth(depth));
        let check = |min_tokens, eos_ids: &[u32], expect: &[u32], cause| {
            let request =
                GenerateRequest { min_tokens, eos_ids: eos_ids.into(), ..request(0..3, 4) };
            let (tokens, finished) = collect(engine.submit(request).unwrap().1);
            assert_eq!((&*tokens, finished.cause), (expect, cause));
        };
        check(0, &[2], &[2], StopCause::EndOfText);
        check(2, &[2, 5], &[1, 1, 2], StopCause::EndOfText);
        check(0, &[], &[2, 2, 2, 2], StopCause::Length);
        check(9, &[2], &[1, 1, 1, 1], StopCause::Length);
    }
}

#[test]
fn the_context_ends_a_sequence() {
    for depth in DEPTHS {
        let engine = start(ScriptedRunner::repeating(vec![1]).depth(depth));
        let (tokens, finished) = collect(engine.submit(request(0..120, 50)).unwrap().1);
        assert_eq!((tokens.len(), finished.cause), (8, StopCause::Length));
    }
}

#[test]
fn a_stop_comes_before_the_next_step() {
    for depth in DEPTHS {
        let (engine, permits) = gated(depth);
        let (id, mut events) = engine.submit(request(0..10, 100)).unwrap();
        permits.send(1).unwrap();
        assert_eq!(events.blocking_recv(), Some(SequenceEvent::Started));
        assert!(matches!(events.blocking_recv(), Some(SequenceEvent::Token { id: 1, .. })));
        engine.stop(id);
        engine.stop(id);
        engine.stop(SequenceId(77));
        // The step in flight may end; another step would give 999.
        permits.send(2).unwrap();
        drop(permits);
        let mut produced = 1;
        loop {
            match events.blocking_recv().unwrap() {
                SequenceEvent::Finished(finished) => {
                    assert_eq!(finished.cause, StopCause::Stopped);
                    assert_eq!(
                        (finished.prompt_tokens, finished.completion_tokens),
                        (10, produced)
                    );
                    break;
                }
                event => assert!(matches!(event, SequenceEvent::Token { id: 2, .. }), "{event:?}"),
            }
            produced += 1;
        }
        idle(&engine);
    }
}

#[test]
fn a_reader_that_leaves_ends_its_sequence_and_no_other() {
    for depth in DEPTHS {
        let (engine, permits) = gated(depth);
        let (_, gone) = engine.submit(request(0..10, 100)).unwrap();
        let (_, stays) = engine.submit(request(20..30, 3)).unwrap();
        drop(gone);
        for token in 0..200 {
            permits.send(token).unwrap();
        }
        let (tokens, finished) = collect(stays);
        assert_eq!((tokens.len(), finished.cause), (3, StopCause::Length));
        idle(&engine);
        assert!(engine.stats().generated_tokens < 10);
    }
}

#[test]
fn a_deadline_ends_a_sequence_whether_it_runs_or_waits() {
    for depth in DEPTHS {
        let (permits, gate) = std::sync::mpsc::sync_channel(1);
        let script = ScriptedRunner::new(move |_| gate.recv().unwrap_or(999)).depth(depth);
        let engine =
            EngineHandle::start(Box::new(script), EngineOptions { max_rows: 1, ..options() });
        let deadline = Instant::now() + Duration::from_secs(1);
        let late = || GenerateRequest { deadline: Some(deadline), ..request(0..10, 118) };
        let (_, mut running) = engine.submit(late()).unwrap();
        let (_, waiting) = engine.submit(late()).unwrap();
        permits.send(7).unwrap();
        assert_eq!(running.blocking_recv(), Some(SequenceEvent::Started));
        assert_eq!(running.blocking_recv(), Some(SequenceEvent::Token { id: 7, logprobs: None }));
        std::thread::sleep(deadline - Instant::now());
        // The step in flight may end; another step would give 999 again.
        drop(permits);
        assert_eq!(running.blocking_recv(), Some(SequenceEvent::Token { id: 999, logprobs: None }));
        let Some(SequenceEvent::Finished(finished)) = running.blocking_recv() else {
            panic!("a step was run after the deadline");
        };
        assert_eq!((finished.cause, finished.completion_tokens), (StopCause::DeadlineExceeded, 2));
        let (tokens, finished) = collect(waiting);
        assert_eq!(finished.cause, StopCause::DeadlineExceeded);
        assert_eq!((tokens.len(), finished.prompt_tokens), (0, 0));
        idle(&engine);
    }
}

#[test]
fn sequences_join_and_leave_a_running_batch() {
    for depth in DEPTHS {
        let engine = EngineHandle::start(
            Box::new(ScriptedRunner::new(|row| row.tokens[0]).depth(depth)),
            EngineOptions { max_waiting: 100, ..options() },
        );
        let submitted: Vec<_> =
            (0..60).map(|i| (i, engine.submit(request(i..i + 5, 1 + i % 17)).unwrap().1)).collect();
        for (i, events) in submitted {
            let (tokens, finished) = collect(events);
            assert_eq!(tokens, vec![i; 1 + i as usize % 17]);
            assert_eq!(finished.cause, StopCause::Length);
        }
        idle(&engine);
    }
}

/// Counts the calls of `recover`.
struct Recovering(ScriptedRunner, Arc<AtomicUsize>);

impl Runner for Recovering {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        self.0.launch(batch, rows)
    }

    fn sample(&mut self, rows: &[Option<RowSampling>]) -> Result<(), EngineError> {
        self.0.sample(rows)
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        self.0.collect()
    }

    fn depth(&self) -> usize {
        Runner::depth(&self.0)
    }

    fn recover(&mut self) -> Result<(), EngineError> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.recover()
    }
}

#[test]
fn a_failed_step_fails_its_sequences_and_the_engine_goes_on() {
    for depth in DEPTHS {
        let check = |failure, expect: &str| {
            let recovered = Arc::new(AtomicUsize::new(0));
            let runner = ScriptedRunner::repeating(vec![1]).depth(depth).fail_at(2, failure);
            let engine = EngineHandle::start(
                Box::new(Recovering(runner, Arc::clone(&recovered))),
                options(),
            );
            let (tokens, finished) = collect(engine.submit(request(0..10, 9)).unwrap().1);
            assert_eq!((tokens.len(), finished.prompt_tokens), (2, 10));
            let StopCause::Failed(reason) = finished.cause else {
                panic!("{failure:?} ended as {:?}", finished.cause);
            };
            assert!(reason.to_string().contains(expect), "{reason}");
            idle(&engine);
            assert_eq!(
                recovered.load(Ordering::Relaxed),
                usize::from(failure != ScriptedFailure::Rows)
            );
            let (tokens, finished) = collect(engine.submit(request(0..10, 9)).unwrap().1);
            assert_eq!((tokens.len(), finished.cause), (9, StopCause::Length));
            assert_eq!(finished.cached_tokens, 0, "what a failed sequence left is not used");
            assert!(engine.ended_by().is_none());
        };
        check(ScriptedFailure::Launch, "scripted failure to launch step 2");
        check(ScriptedFailure::Error, "scripted failure of step 2");
        check(ScriptedFailure::Panic, "scripted panic in step 2");
        check(ScriptedFailure::Rows, "scripted failure in step 2");
    }
}

/// Returns how the only sequence of an engine ends whose third step fails with `error`.
fn end_by(failure: ScriptedFailure, error: &EngineError) -> (EngineHandle, StopCause) {
    let runner = ScriptedRunner::repeating(vec![1]).fail_at(2, failure).fail_with(error.clone());
    let engine = start(runner);
    let (_, events) = engine.submit(request(0..10, 9)).unwrap();
    (engine, collect(events).1.cause)
}

#[test]
fn each_kind_of_error_reaches_the_sequence_as_itself() {
    let text = || "scripted".to_owned();
    for error in [
        EngineError::Shape(text()),
        EngineError::OutOfMemory(text()),
        EngineError::DeviceLost(text()),
        EngineError::Integrity(text()),
        EngineError::Compute(text()),
        EngineError::Panicked(text()),
    ] {
        for failure in [ScriptedFailure::Launch, ScriptedFailure::Error] {
            let (engine, cause) = end_by(failure, &error);
            assert_eq!(cause, StopCause::Failed(error.clone()));
            if error.is_device_lost() {
                // No step of this process can run there any more.
                while engine.ended_by().is_none() {
                    std::thread::yield_now();
                }
            } else {
                assert!(engine.ended_by().is_none(), "a step's error ends its sequences only");
            }
        }
    }
    let (engine, cause) = end_by(ScriptedFailure::Rows, &EngineError::Sampling(text()));
    assert_eq!(cause, StopCause::Failed(EngineError::Sampling(text())));
    assert!(engine.ended_by().is_none());
}

#[test]
fn an_engine_that_ends_tells_every_handle_why() {
    let broken = EngineError::Integrity("scripted end of the engine".into());
    let (engine, cause) = end_by(ScriptedFailure::Fatal, &EngineError::Compute("scripted".into()));
    assert_eq!(cause, StopCause::Failed(EngineError::Compute("scripted".into())));
    let refused = || engine.submit(request(0..10, 1)).unwrap_err();
    // The sequence gets its end a moment before the engine ends.
    while engine.ended_by().is_none() {
        std::thread::yield_now();
    }
    assert_eq!((engine.ended_by(), refused()), (Some(broken.clone()), Refused::Dead(broken)));
    engine.shutdown();
    assert_eq!(engine.ended_by().map(|error| error.kind()), Some("integrity"));
    let stopped = EngineError::Stopped(Box::new(EngineError::ShutDown));
    assert_eq!((stopped.kind(), EngineError::ShutDown.kind()), ("shut_down", "shut_down"));
}

#[test]
fn a_token_of_a_step_launched_too_far_is_neither_sent_nor_counted() {
    let engine = start(ScriptedRunner::repeating(vec![1, 1, 2]).depth(2));
    let until_two = GenerateRequest { eos_ids: [2].into(), ..request(0..10, 9) };
    let (tokens, finished) = collect(engine.submit(until_two).unwrap().1);
    assert_eq!((&*tokens, finished.cause), (&[1, 1, 2][..], StopCause::EndOfText));
    idle(&engine);
    let stats = engine.stats();
    assert_eq!((stats.generated_tokens, stats.steps), (3, 4));
}

#[test]
fn a_runner_beyond_recovery_ends_the_engine() {
    for depth in DEPTHS {
        let runner = ScriptedRunner::repeating(vec![1])
            .depth(depth)
            .step_time(Duration::from_millis(1))
            .fail_at(3, ScriptedFailure::Fatal);
        let engine =
            EngineHandle::start(Box::new(runner), EngineOptions { max_rows: 1, ..options() });
        let (_, running) = engine.submit(request(0..10, 100)).unwrap();
        let (_, waiting) = engine.submit(request(0..10, 100)).unwrap();
        for events in [running, waiting] {
            assert!(matches!(collect(events).1.cause, StopCause::Failed(_)));
        }
        let refused = engine.submit(request(0..10, 1)).unwrap_err();
        assert!(
            matches!(refused, Refused::Dead(reason) if reason.to_string().contains("scripted end"))
        );
        assert!(engine.ended_by().is_some());
    }
}

#[test]
fn more_than_rows_and_queue_is_refused() {
    let (engine, permits) = gated(1);
    let mut admitted: Vec<_> = (0..12).map(|_| engine.submit(request(0..10, 1)).unwrap()).collect();
    let refused = engine.submit(request(0..10, 1)).unwrap_err();
    assert!(matches!(refused, Refused::Overloaded { .. }), "{refused:?}");
    let refused = engine.submit(request(0..128, 1)).unwrap_err();
    assert!(matches!(refused, Refused::TooLarge(_)), "{refused:?}");
    drop(permits);
    admitted.drain(..).for_each(|(_, events)| drop(collect(events)));
    idle(&engine);
    engine.submit(request(0..10, 1)).unwrap();
}

#[test]
fn what_runs_in_the_background_is_stopped_by_a_drain_and_fills_no_queue() {
    let (permits, gate) = std::sync::mpsc::sync_channel(1);
    let script = ScriptedRunner::new(move |_| gate.recv().unwrap_or(9));
    let engine =
        EngineHandle::start(Box::new(script), EngineOptions { max_waiting: 0, ..options() });
    let behind = || GenerateRequest { background: true, ..request(0..10, 90) };
    let running: Vec<_> = (0..20).map(|_| engine.submit(behind()).unwrap().1).collect();
    let (_, events) = engine.submit(request(0..10, 2)).unwrap();
    permits.send(7).unwrap();
    engine.drain();
    drop(permits);
    assert_eq!(collect(events).1.cause, StopCause::Length);
    for events in running {
        assert_eq!(collect(events).1.cause, StopCause::Stopped);
    }
    assert_eq!(engine.submit(behind()).unwrap_err(), Refused::Draining);
    idle(&engine);
    let stats = engine.stats();
    assert_eq!((stats.prompt_tokens, stats.generated_tokens), (10, 2), "it counts in no metric");
}

#[test]
fn draining_refuses_newcomers_and_finishes_the_rest() {
    let (engine, permits) = gated(1);
    let (_, events) = engine.submit(request(0..10, 2)).unwrap();
    engine.drain();
    assert_eq!(engine.submit(request(0..10, 1)).unwrap_err(), Refused::Draining);
    drop(permits);
    assert_eq!(collect(events).0.len(), 2);
    assert!(engine.ended_by().is_none());
}

#[test]
fn shutting_down_ends_the_thread_and_what_still_runs() {
    for depth in DEPTHS {
        let runner =
            ScriptedRunner::repeating(vec![1]).depth(depth).step_time(Duration::from_millis(1));
        let engine = start(runner);
        let (_, events) = engine.submit(request(0..10, 100)).unwrap();
        engine.clone().shutdown();
        assert!(engine.ended_by().is_some());
        let StopCause::Failed(reason) = collect(events).1.cause else {
            panic!("a shutdown is the node's failure");
        };
        assert!(reason.to_string().contains("shut down"), "{reason}");
        assert!(matches!(engine.submit(request(0..10, 1)), Err(Refused::Dead(_))));
        engine.shutdown();
    }
}

#[test]
fn the_last_handle_takes_the_engine_along() {
    struct Witness(SyncSender<()>);
    impl Drop for Witness {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }
    let (gone, seen) = std::sync::mpsc::sync_channel(1);
    let witness = Witness(gone);
    let engine = start(ScriptedRunner::new(move |_| {
        let _keep = &witness;
        1
    }));
    drop(engine.clone());
    assert!(seen.try_recv().is_err());
    drop(engine);
    seen.recv_timeout(Duration::from_secs(20)).unwrap();
}

#[test]
fn logprobs_come_with_the_tokens_that_asked_for_them() {
    for depth in DEPTHS {
        let engine = start(ScriptedRunner::repeating(vec![5]).depth(depth));
        let mut with = request(0..3, 1);
        with.sampling.logprobs = Some(2);
        let (_, mut events) = engine.submit(with).unwrap();
        assert_eq!(events.blocking_recv(), Some(SequenceEvent::Started));
        let logprobs = Some(TokenLogprobs { chosen: 0.0, top: vec![(5, 0.0)] });
        assert_eq!(events.blocking_recv(), Some(SequenceEvent::Token { id: 5, logprobs }));
    }
}

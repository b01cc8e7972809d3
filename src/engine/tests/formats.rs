//! Answers that keep to a grammar, with one step in flight and with two: the grammar is asked for
//! the same tokens, and the answers are the same.

use super::*;
use crate::grammar::TokenGrammar;
use crate::runner::{RowResult, Runner};
use crate::testing::ScriptedRunner;
use cresset_kernels::sampling::params::{RowSampling, TokenMask};
use cresset_models::ForwardBatch;
use std::sync::Mutex;

const END: u32 = 2;

fn mask_of(ids: impl IntoIterator<Item = u32>) -> Arc<[u32]> {
    let mut words = vec![0; 64];
    ids.into_iter().for_each(|id| words[id as usize / 32] |= 1 << (id % 32));
    words.into()
}

/// Allows a third of the ids each time. Which third follows from every token before.
#[derive(Debug)]
pub struct Thirds;

#[derive(Debug, Default)]
struct ThirdsPlace(Mutex<Vec<u32>>);

impl TokenGrammar for Thirds {
    fn begin(&self) -> Arc<dyn TokenMask> {
        Arc::<ThirdsPlace>::default()
    }
}

impl TokenMask for ThirdsPlace {
    fn allowed_after(&self, output: &[u32]) -> Result<Arc<[u32]>, String> {
        let mut before = self.0.lock().unwrap();
        assert!(output.starts_with(&before), "an output only grows");
        *before = output.to_vec();
        let third = output.iter().sum::<u32>() % 3;
        Ok(mask_of((0..2048).filter(|id| id % 3 == third)))
    }
}

/// Allows one answer, and then its end; or fails after so many tokens. It notes the lengths of the
/// outputs for which it was asked.
#[derive(Clone, Debug, Default)]
struct Only {
    answer: Vec<u32>,
    fails_after: Option<usize>,
    asked: Arc<Mutex<Vec<usize>>>,
}

impl TokenGrammar for Only {
    fn begin(&self) -> Arc<dyn TokenMask> {
        Arc::new(self.clone())
    }
}

impl TokenMask for Only {
    fn allowed_after(&self, output: &[u32]) -> Result<Arc<[u32]>, String> {
        self.asked.lock().unwrap().push(output.len());
        if self.fails_after == Some(output.len()) {
            return Err("it costs too much".into());
        }
        assert!(self.answer.starts_with(output), "asked after {output:?}");
        Ok(mask_of([self.answer.get(output.len()).copied().unwrap_or(END)]))
    }
}

/// A runner that notes which calls are made of it, and may fail to sample.
struct NotingRunner {
    runner: ScriptedRunner,
    calls: Arc<Mutex<Vec<&'static str>>>,
    fails_to_sample: bool,
}

impl NotingRunner {
    fn note(&self, call: &'static str) {
        self.calls.lock().unwrap().push(call);
    }
}

impl Runner for NotingRunner {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        self.note("launch");
        self.runner.launch(batch, rows)
    }

    fn sample(&mut self, rows: &[Option<RowSampling>]) -> Result<(), EngineError> {
        self.note("sample");
        if std::mem::take(&mut self.fails_to_sample) {
            return Err(EngineError::Compute("no mask could be uploaded".into()));
        }
        self.runner.sample(rows)
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        self.note("collect");
        self.runner.collect()
    }

    fn depth(&self) -> usize {
        Runner::depth(&self.runner)
    }

    fn recover(&mut self) -> Result<(), EngineError> {
        self.runner.recover()
    }
}

fn keeping_to(grammar: &(impl TokenGrammar + Clone + 'static), max_tokens: u32) -> GenerateRequest {
    let (eos_ids, grammar) = ([END].into(), Some(Arc::new(grammar.clone()) as _));
    GenerateRequest { eos_ids, grammar, ..request(0..10, max_tokens) }
}

fn noted(depth: usize, fails_to_sample: bool) -> (EngineHandle, Arc<Mutex<Vec<&'static str>>>) {
    let calls = Arc::<Mutex<Vec<&'static str>>>::default();
    let runner = ScriptedRunner::repeating(vec![9]).depth(depth);
    let runner = NotingRunner { runner, calls: calls.clone(), fails_to_sample };
    (EngineHandle::start(Box::new(runner), options()), calls)
}

fn spelled(answer: &[u32]) -> Only {
    Only { answer: answer.to_vec(), ..Only::default() }
}

/// The logits of a step are launched before the tokens of the last one are known, and sampled after
/// that. A step without grammars is sampled at once.
#[test]
fn a_step_is_sampled_when_the_tokens_before_are_known() {
    let check = |depth, request: GenerateRequest, expect: &[&str]| {
        let (engine, calls) = noted(depth, false);
        assert_eq!(collect(engine.submit(request).unwrap().1).0.len(), 3);
        assert_eq!(*calls.lock().unwrap(), expect, "depth {depth}");
    };
    let plain = ["launch", "launch", "collect", "launch", "collect", "collect"];
    let masked =
        ["launch", "launch", "collect", "sample", "launch", "collect", "sample", "collect"];
    let in_turns = ["launch", "collect", "launch", "collect", "launch", "collect"];
    check(2, request(0..10, 3), &plain);
    check(2, keeping_to(&spelled(&[5, 6, 7, 8]), 3), &masked);
    check(1, keeping_to(&spelled(&[5, 6, 7, 8]), 3), &in_turns);
}

#[test]
fn a_grammar_that_ends_in_flight_is_asked_no_more() {
    for depth in [1, 2] {
        let (engine, _) = noted(depth, false);
        let grammar = spelled(&[5, 6, 7]);
        let (tokens, finished) = collect(engine.submit(keeping_to(&grammar, 20)).unwrap().1);
        assert_eq!((&*tokens, finished.cause), (&[5, 6, 7, END][..], StopCause::EndOfText));
        assert_eq!(*grammar.asked.lock().unwrap(), [0, 1, 2, 3], "depth {depth}");
    }
}

/// A grammar's failure ends its own answer, behind the tokens before it. Another with a grammar and
/// one without go on.
#[test]
fn a_grammar_that_fails_in_flight_fails_its_own_answer() {
    for depth in [1, 2] {
        let (engine, _) = noted(depth, false);
        let failing = Only { fails_after: Some(2), ..spelled(&[5, 6, 7, 8]) };
        let all = [keeping_to(&failing, 20), keeping_to(&spelled(&[3, 4, 5, 6]), 20)];
        let all = all.into_iter().chain([request(0..10, 6)]);
        let events: Vec<_> = all.map(|request| engine.submit(request).unwrap().1).collect();
        let ends: Vec<_> = events.into_iter().map(collect).collect();
        let failed = StopCause::Failed(EngineError::Grammar("it costs too much".into()));
        assert_eq!((&*ends[0].0, &ends[0].1.cause), (&[5, 6][..], &failed), "depth {depth}");
        assert_eq!(*failing.asked.lock().unwrap(), [0, 1, 2]);
        assert_eq!(
            (&*ends[1].0, &ends[1].1.cause),
            (&[3, 4, 5, 6, END][..], &StopCause::EndOfText)
        );
        assert_eq!((&*ends[2].0, &ends[2].1.cause), (&[9; 6][..], &StopCause::Length));
    }
}

/// The step before has its results. The sequences of the step that was not sampled fail, and the
/// engine goes on.
#[test]
fn a_step_that_cannot_be_sampled_fails_its_sequences() {
    let (engine, _) = noted(2, true);
    let grammar = spelled(&[5, 6, 7]);
    let (tokens, finished) = collect(engine.submit(keeping_to(&grammar, 9)).unwrap().1);
    assert_eq!(tokens, [5]);
    let StopCause::Failed(EngineError::Compute(why)) = finished.cause else {
        panic!("{:?}", finished.cause)
    };
    assert!(why.contains("no mask"), "{why}");
    let (tokens, _) = collect(engine.submit(keeping_to(&grammar, 9)).unwrap().1);
    assert_eq!(tokens, [5, 6, 7, END]);
}

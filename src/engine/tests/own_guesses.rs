//! A model's own head changes no token, and it guesses what it would guess of each text alone: its
//! K and V, and the states that it goes on from, are those of the text.

use super::speculation::events;
use super::*;
use crate::model_runner::ModelRunner;
use crate::runner::{RowResult, Runner};
use cresset_models::testing::{GuessGolden, guess_goldens};
use cresset_models::{ForwardBatch, ModelOptions, WantedGuesses};
use std::sync::Mutex;

const BLOCK: usize = 4;
const CONTEXT: usize = 128;

/// How a sequence's next token was sampled, and the guesses that were made of it.
type Calls = Arc<Mutex<Vec<(RowSampling, Vec<u32>)>>>;

/// A slow model, beside whose steps a guess costs little, that keeps what it guessed.
struct Recorder {
    inner: ModelRunner,
    calls: Calls,
    fails: bool,
}

impl Runner for Recorder {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        std::thread::sleep(Duration::from_millis(4));
        self.inner.launch(batch, rows)
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        self.inner.collect()
    }

    fn guesses(&self) -> bool {
        self.inner.guesses()
    }

    fn guess(&mut self, wanted: Vec<WantedGuesses>) -> Result<Vec<Vec<u32>>, EngineError> {
        let rows: Vec<_> = wanted.iter().map(|wanted| wanted.row.clone()).collect();
        if self.fails {
            self.calls.lock().unwrap().extend(rows.into_iter().map(|row| (row, vec![])));
            panic!("planted");
        }
        let guesses = self.inner.guess(wanted)?;
        self.calls.lock().unwrap().extend(rows.into_iter().zip(guesses.clone()));
        Ok(guesses)
    }
}

fn load(source: &ModelSource, guesses: bool) -> (ModelRunner, CacheKinds) {
    let options = ModelOptions {
        guesses,
        dequantise: false,
        kv_bytes: 8 << 20,
        state_tokens: 8,
        block_size: BLOCK,
        max_batched_tokens: CONTEXT,
        max_context: Some(CONTEXT),
        ..ModelOptions::default()
    };
    let (runner, info) = ModelRunner::load(source, &options).unwrap();
    (runner, info.cache)
}

/// The blocks, states and budget of an engine.
#[derive(Clone, Copy, Debug)]
struct Limits {
    blocks: usize,
    states: usize,
    budget: usize,
}

const AMPLE: Limits = Limits { blocks: 300, states: 100, budget: 64 };

/// An engine that guesses with the model's head, or not at all.
fn engine(source: &ModelSource, guesses: bool, limits: Limits) -> (EngineHandle, Calls) {
    engine_that(source, guesses, limits, false)
}

/// The same, whose head may fail whenever it is asked.
fn engine_that(
    source: &ModelSource,
    guesses: bool,
    limits: Limits,
    fails: bool,
) -> (EngineHandle, Calls) {
    let (inner, cache) = load(source, guesses);
    assert_eq!(inner.guesses(), guesses);
    let calls = Calls::default();
    let options = EngineOptions {
        speculative_tokens: if guesses { 4 } else { 0 },
        num_blocks: limits.blocks,
        max_batched_tokens: limits.budget,
        max_rows: 4,
        max_waiting: 20,
        max_context: CONTEXT,
        cache: CacheKinds { states: cache.states.min(limits.states), ..cache },
        ..options()
    };
    let runner = Recorder { inner, calls: calls.clone(), fails };
    (EngineHandle::start(Box::new(runner), options), calls)
}

/// Requests for few of the tokens, so that some guesses are right. Their prompts begin with the
/// same 17 tokens, one more than some blocks, and nothing recurs in them.
fn requests() -> Vec<GenerateRequest> {
    let common = (0..17).map(|i| i * 5 % 48);
    let prompt = |salt: u32| common.clone().chain((0..9 + 5 * salt).map(move |i| i * (7 + salt)));
    let logit_bias: Arc<[(u32, f32)]> = (0..7).map(|i| (3 + 6 * i, 30.0)).collect();
    let sampling = |i: u32| SamplingParams {
        temperature: [0.0, 0.8, 1.0][i as usize % 3],
        frequency_penalty: [0.0, 0.3][i as usize % 2],
        seed: i.into(),
        logprobs: Some(2).filter(|_| i == 1),
        logit_bias: logit_bias.clone(),
        ..SamplingParams::default()
    };
    let request = |i| {
        let prompt = prompt(i).map(|token| token % 48);
        GenerateRequest { sampling: sampling(i), ..request(prompt, 50) }
    };
    (0..6).map(request).collect()
}

/// What the head guesses of a text that is computed in one step.
fn guessed_alone(
    (runner, cache): &mut (ModelRunner, CacheKinds),
    row: &RowSampling,
    most: usize,
) -> Vec<u32> {
    let (last, text) = row.tokens.split_last().unwrap();
    let (end, blocks) = (text.len() as u32, (0..(CONTEXT / BLOCK) as u32).collect::<Vec<_>>());
    let step = ForwardBatch {
        input_ids: text.to_vec(),
        positions: (0..end).collect(),
        cu_seqlens_q: vec![0, end],
        seq_lens: vec![end],
        block_tables: vec![blocks.clone()],
        slot_mapping: (0..end).collect(),
        following: vec![*last],
        ..ForwardBatch::default()
    };
    runner.launch(&step.spread(cache, BLOCK), &[]).unwrap();
    runner.collect().unwrap();
    let wanted = WantedGuesses { row: row.clone(), blocks, most };
    runner.guess(vec![wanted]).unwrap().remove(0)
}

/// Runs all requests with the head's guesses, and compares the tokens with those of an engine
/// without it, and the guesses with those of each text alone.
fn check(source: &ModelSource) {
    let (plain, _) = engine(source, false, AMPLE);
    let (expect, without) = events(&plain, requests(), false);
    let mut alone = load(source, true);
    let (mut right, mut wrong, mut chained, mut preempted) = (0, 0, 0, 0);
    let little = Limits { blocks: 40, states: 10, budget: 64 };
    let chunked = Limits { budget: 12, ..AMPLE };
    for (limits, together) in [(AMPLE, false), (chunked, true), (little, true)] {
        let (engine, calls) = engine(source, true, limits);
        let (found, stats) = events(&engine, requests(), together);
        assert!(found == expect, "{limits:?}, {stats:?}");
        assert_eq!(stats.generated_tokens, without.generated_tokens);
        let calls = std::mem::take(&mut *calls.lock().unwrap());
        for (row, guesses) in &calls {
            assert_eq!(guessed_alone(&mut alone, row, guesses.len()), *guesses, "{limits:?}");
        }
        assert!(calls.iter().any(|(_, guesses)| !guesses.is_empty()), "{limits:?}");
        chained += calls.iter().filter(|(_, guesses)| guesses.len() > 1).count();
        right += stats.accepted_tokens;
        wrong += stats.draft_tokens - stats.accepted_tokens;
        preempted += stats.preemptions;
        assert!(together || stats.prefix_hit_tokens > 0, "{stats:?}");
    }
    assert!(right > 0 && wrong > 0 && chained > 0 && preempted > 0, "{right} {wrong} {chained}");
}

/// The model of a case, written to `folder`, for sequences of up to `context` tokens.
pub fn source_of(case: &GuessGolden, folder: &Path, context: usize) -> ModelSource {
    let mut config = case.model.config.clone();
    config["max_position_embeddings"] = context.into();
    case.model.write(folder, &config).unwrap();
    ModelSource::hf_folder(folder.to_owned())
}

#[test]
fn the_models_own_head_changes_no_token() {
    for case in guess_goldens().unwrap() {
        let folder = tempfile::tempdir().unwrap();
        check(&source_of(&case, folder.path(), CONTEXT));
    }
}

/// A cancelled sequence leaves no block behind, and a head that fails guesses no more.
#[test]
fn a_stop_ends_guesses_and_a_fault_of_the_head_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let source = source_of(&guess_goldens().unwrap()[0], folder.path(), CONTEXT);
    let (stopped, calls) = engine(&source, true, AMPLE);
    let (id, receiver) = stopped.submit(requests().remove(5)).unwrap();
    wait_for(&stopped, "guesses", |_| !calls.lock().unwrap().is_empty());
    stopped.stop(id);
    assert_eq!(collect(receiver).1.cause, StopCause::Stopped);
    wait_for(&stopped, "idle", |stats| stats.running + stats.blocks_used == 0);
    let (expect, _) = events(&engine(&source, false, AMPLE).0, requests(), false);
    let (failing, calls) = engine_that(&source, true, AMPLE, true);
    assert!(events(&failing, requests(), false).0 == expect);
    assert_eq!(calls.lock().unwrap().len(), 1);
}

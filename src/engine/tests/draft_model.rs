//! A draft model changes no token, whatever it guesses, and is asked as long as that pays.

use super::*;
use crate::draft_model::DraftModel;
use crate::model_runner::ModelRunner;
use crate::runner::{RowResult, Runner};
use crate::testing::ScriptedRunner;
use cresset_kernels::sampling::params::RowSampling;
use cresset_kernels::sampling::philox4x32;
use cresset_models::testing::tiny_llama_gguf;
use cresset_models::{ForwardBatch, ModelOptions};

/// A large model: each step takes long, however many tokens it has.
struct Slow(ModelRunner);

impl Runner for Slow {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        std::thread::sleep(Duration::from_millis(15));
        self.0.launch(batch, rows)
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        self.0.collect()
    }
}

fn limits() -> EngineOptions {
    EngineOptions {
        speculative_tokens: 4,
        num_blocks: 300,
        max_rows: 6,
        max_waiting: 20,
        ..options()
    }
}

/// The tiny model whose weights have this seed.
fn tiny(seed: u64) -> ModelRunner {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_llama_gguf(&path, seed).unwrap();
    let limits = limits();
    let loaded = ModelOptions {
        kv_bytes: 8 << 20,
        block_size: limits.block_size,
        max_batched_tokens: limits.max_batched_tokens,
        max_context: Some(limits.max_context),
        ..ModelOptions::default()
    };
    ModelRunner::load(&ModelSource::gguf(path), &loaded).unwrap().0
}

fn draft(runner: impl Runner + 'static) -> DraftModel {
    DraftModel::new(Box::new(runner), limits(), vocabulary())
}

fn vocabulary() -> usize {
    cresset_models::testing::vocab_size()
}

/// Texts in which nothing recurs, drawn in different ways.
fn requests() -> impl Iterator<Item = GenerateRequest> {
    let vocabulary = vocabulary() as u32;
    let sampling = |i: u32| SamplingParams {
        temperature: [0.0, 0.7, 1.0][i as usize % 3],
        presence_penalty: [0.0, 0.4][i as usize % 2],
        seed: i.into(),
        ..SamplingParams::default()
    };
    (0..6).map(move |i| GenerateRequest {
        sampling: sampling(i),
        ..request((0..20 + 9 * i).map(|token| (token * 5 + i) % vocabulary), 40)
    })
}

/// The tokens of all requests, together or one after the other, and the statistics afterwards.
fn tokens(model: Option<DraftModel>, together: bool) -> (Vec<Vec<u32>>, EngineStats) {
    let engine = EngineHandle::start_with(Box::new(Slow(tiny(3))), model, limits());
    let submit = |request| engine.submit(request).unwrap().1;
    let all = if together {
        let events: Vec<_> = requests().map(submit).collect();
        events.into_iter().map(|events| collect(events).0).collect()
    } else {
        requests().map(|request| collect(submit(request)).0).collect()
    };
    wait_for(&engine, "idle", |stats| stats.running + stats.blocks_used == 0);
    (all, engine.stats())
}

#[test]
fn a_draft_model_changes_no_token() {
    let (expect, without) = tokens(None, false);
    // The same model guesses what is drawn, and another one hardly ever does.
    for seed in [3, 4] {
        let (found, stats) = tokens(Some(draft(tiny(seed))), false);
        assert!(found == expect, "{stats:?}");
        // The text gives few drafts, and hardly a right one.
        assert!(stats.draft_tokens > without.draft_tokens, "{stats:?}");
        let wrong = stats.draft_tokens - stats.accepted_tokens;
        let right = wrong <= without.draft_tokens + 20 && stats.accepted_tokens > 80;
        assert_eq!(right, seed == 3, "{stats:?}");
        let (found, stats) = tokens(Some(draft(tiny(seed))), true);
        assert!(found == expect, "{stats:?}");
    }
}

/// After some wrong guesses of each sequence it is not asked in that sequence, and soon in none.
#[test]
fn a_draft_model_that_guesses_at_random_turns_itself_off() {
    let (expect, without) = tokens(None, false);
    let at_random = |row: &RowSampling| {
        philox4x32([row.tokens.len() as u32, row.params.seed as u32, 0, 0], [1, 9])[0]
            % vocabulary() as u32
    };
    let (found, stats) = tokens(Some(draft(ScriptedRunner::new(at_random))), false);
    assert!(found == expect, "{stats:?}");
    let guessed = stats.draft_tokens.saturating_sub(without.draft_tokens);
    assert!((4..200).contains(&guessed), "{guessed}: {stats:?}");
    assert_eq!(stats.generated_tokens, without.generated_tokens);
}

#[test]
fn a_stop_ends_guesses_and_a_fault_of_the_draft_model_nothing() {
    let failing =
        ScriptedRunner::repeating(vec![5]).fail_at(1, crate::testing::ScriptedFailure::Panic);
    let (expect, _) = tokens(None, false);
    let (found, stats) = tokens(Some(draft(failing)), false);
    assert!(found == expect, "{stats:?}");
    let engine = EngineHandle::start_with(Box::new(Slow(tiny(3))), Some(draft(tiny(3))), limits());
    let (id, events) = engine.submit(request(0..30, 90)).unwrap();
    wait_for(&engine, "guesses", |stats| stats.accepted_tokens > 8);
    engine.stop(id);
    assert_eq!(collect(events).1.cause, StopCause::Stopped);
    wait_for(&engine, "idle", |stats| stats.running + stats.blocks_used == 0);
}

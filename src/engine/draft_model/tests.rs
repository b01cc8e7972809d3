//! Its guesses are those of its own model, whatever was guessed before; its blocks are accounted
//! for; and no fault of it reaches a sequence.

use super::*;
use crate::model_runner::ModelRunner;
use crate::testing::{ScriptedFailure, ScriptedRunner, small_options};
use cresset_kernels::sampling::params::SamplingParams;
use cresset_kernels::sampling::philox4x32;
use cresset_models::testing::tiny_llama_gguf;
use cresset_models::{ModelOptions, ModelSource};

/// A tiny model with so many blocks of 16 tokens, which reads 24 tokens in a step.
fn tiny(num_blocks: usize) -> DraftModel {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_llama_gguf(&path, 3).unwrap();
    let options = EngineOptions { max_batched_tokens: 24, num_blocks, ..small_options() };
    let loaded = ModelOptions {
        kv_bytes: 4 << 20,
        max_batched_tokens: options.max_batched_tokens,
        max_context: Some(options.max_context),
        ..ModelOptions::default()
    };
    let (runner, info) = ModelRunner::load(&ModelSource::gguf(path), &loaded).unwrap();
    assert!(info.num_blocks >= num_blocks);
    DraftModel::new(Box::new(runner), options, info.config.vocab_size)
}

fn scripted(runner: ScriptedRunner, vocabulary: usize) -> DraftModel {
    DraftModel::new(Box::new(runner), small_options(), vocabulary)
}

fn wanted(id: u64, tokens: &[u32], most: usize) -> Wanted {
    let params = SamplingParams { seed: id, temperature: 0.8, ..SamplingParams::default() };
    let row = RowSampling {
        params: Arc::new(params),
        tokens: Arc::new(tokens.to_vec()),
        pending: None,
        prompt_len: 1,
        banned: Arc::default(),
        grammar: None,
    };
    Wanted { id: SequenceId(id), row, blocks: Vec::new(), most }
}

/// The tokens that the model guesses behind a text, which it reads in several steps.
fn guesses(model: &mut DraftModel, id: u64, tokens: &[u32], most: usize) -> Vec<u32> {
    let mut all = Vec::new();
    for _ in 0..=tokens.len() / 24 {
        all = model.propose(vec![wanted(id, tokens, most)]).remove(0);
    }
    all
}

fn check_blocks(model: &DraftModel) {
    let tables = model.texts.values().map(|text| &text.table);
    model.blocks.check_integrity(tables).unwrap();
}

#[test]
fn a_text_is_read_in_several_steps_and_then_guessed() {
    let mut model = tiny(64);
    let text: Vec<u32> = (0..50).collect();
    let mut propose = |text: &[u32]| model.propose(vec![wanted(1, text, 4)]).remove(0);
    assert!(propose(&text).is_empty() && propose(&text).is_empty());
    let guessed = propose(&text);
    assert_eq!(guessed.len(), 4);
    // A longer guess of the same text begins alike.
    assert_eq!(model.propose(vec![wanted(1, &text, 9)]).remove(0)[..4], guessed);
}

/// Texts grow by right and by wrong guesses, end, and lose their blocks to others.
#[test]
fn guesses_follow_from_the_text_alone() {
    let (mut model, mut alone) = (tiny(9), 0);
    let mut texts: Vec<Vec<u32>> = (0..5).map(|i| vec![i + 1; 3 + i as usize]).collect();
    let mut given = 0;
    for round in 0..60 {
        let draw = |i: u32| philox4x32([round, i, 0, 0], [5, 6]);
        let (asked, others): (Vec<_>, Vec<_>) = (0..5).partition(|i| draw(*i)[0] % 3 > 0);
        let ask = |i: &u32| wanted((*i).into(), &texts[*i as usize], 3);
        let all = model.propose(asked.iter().map(ask).collect());
        check_blocks(&model);
        for (i, found) in asked.into_iter().zip(all) {
            let [_, right, wrong, end] = draw(i);
            let text = &mut texts[i as usize];
            // The cache holds tokens of this text and its guesses, and none of an earlier guess
            // that was wrong.
            let read = &model.texts[&SequenceId(i.into())].tokens;
            assert!([&text[..], &found].concat().starts_with(read), "{read:?}");
            if !found.is_empty() {
                given += 1;
                if given % 8 == 0 {
                    alone += 1;
                    let want = guesses(&mut tiny(64), i.into(), text, 3);
                    assert_eq!(found, want[..found.len()]);
                }
            }
            text.extend(&found[..found.len().min(right as usize % 4)]);
            text.push(wrong % 50);
            if text.len() > 56 || end % 16 == 0 {
                model.forget(SequenceId(i.into()));
                text.truncate(1 + wrong as usize % 4);
            }
        }
        // Some of the others go on without a guess, so that several tokens are not those guessed.
        for i in others.into_iter().filter(|i| draw(*i)[1] % 2 == 0) {
            texts[i as usize].push(draw(i)[2] % 50);
        }
    }
    assert!(alone > 10, "{given} guesses");
    for id in 0..5 {
        model.forget(SequenceId(id));
    }
    check_blocks(&model);
    assert_eq!(model.blocks_used(), 0);
}

/// Three blocks hold two texts of 20 tokens only if one loses its own.
#[test]
fn texts_that_are_asked_for_no_more_make_room() {
    let mut model = tiny(3);
    let text: Vec<u32> = (0..20).collect();
    for id in [1, 2, 2, 2] {
        model.propose(vec![wanted(id, &text, 2)]);
        assert!(model.blocks_used() <= 3);
    }
    assert_eq!(guesses(&mut model, 2, &text, 2), guesses(&mut tiny(64), 2, &text, 2));
    // Two that are asked for at the same time do not take each other's.
    let both = || vec![wanted(2, &text, 2), wanted(3, &text, 2)];
    for _ in 0..4 {
        let given: Vec<_> = model.propose(both()).iter().map(Vec::len).collect();
        assert_eq!(given, [2, 0]);
    }
}

#[test]
fn tokens_that_only_one_model_has_are_not_guessed() {
    let runner = || ScriptedRunner::repeating(vec![5, 6, 90, 7]);
    assert_eq!(guesses(&mut scripted(runner(), 100), 1, &[3], 3), [5, 6, 90]);
    assert_eq!(guesses(&mut scripted(runner(), 90), 1, &[3], 3), [5, 6]);
    assert_eq!(guesses(&mut scripted(runner(), 90), 1, &[3, 95], 3), [0; 0]);
}

#[test]
fn nothing_is_guessed_beyond_the_context() {
    let text: Vec<u32> = (0..62).collect();
    let mut model = scripted(ScriptedRunner::repeating(vec![5]), 100);
    // The 64th token can be read, and gives one more.
    assert_eq!(guesses(&mut model, 1, &text, 9), [5; 3]);
}

#[test]
fn a_model_that_fails_is_not_asked_again() {
    for failure in [ScriptedFailure::Launch, ScriptedFailure::Error, ScriptedFailure::Panic] {
        let runner = ScriptedRunner::repeating(vec![5]).fail_at(2, failure);
        let mut model = scripted(runner, 100);
        assert_eq!(guesses(&mut model, 1, &[3], 2), [5, 5]);
        assert_eq!(guesses(&mut model, 1, &[3, 5, 5], 2), [0; 0]);
        assert!(model.seconds_per_draft().is_infinite() && model.blocks_used() == 0);
    }
}

//! Drafts change no token, whatever the sampling, and the blocks of wrong ones are computed again.

use super::*;
use crate::engine::model_runner::ModelRunner;
use crate::engine::testing::ScriptedRunner;
use cresset_models::testing::{tiny_llama_gguf, vocab_size};
use cresset_models::{ModelOptions, ModelSource};

const DRAFTS: usize = 8;

/// An engine around a tiny model whose cache has `num_blocks` blocks of 4 tokens.
fn engine(speculative_tokens: usize, num_blocks: usize) -> EngineHandle {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_llama_gguf(&path, 3).unwrap();
    let options = EngineOptions {
        num_blocks,
        speculative_tokens,
        max_rows: 4,
        max_context: 192,
        ..super::options()
    };
    let loaded = ModelOptions {
        threads: 2,
        dequantise: false,
        kv_bytes: 8 << 20,
        block_size: options.block_size,
        max_batched_tokens: options.max_batched_tokens,
        max_context: Some(options.max_context),
        ..ModelOptions::default()
    };
    let (runner, _) = ModelRunner::load(&ModelSource::gguf(path), &loaded).unwrap();
    EngineHandle::start(Box::new(runner), options)
}

/// Requests whose text repeats itself, so that there are drafts, and is drawn in different ways, so
/// that some of them are wrong.
fn requests() -> Vec<GenerateRequest> {
    let vocabulary = vocab_size() as u32;
    let prompt = |salt: u32| (0..48).map(move |i| (i % 12 * 7 + salt) % vocabulary);
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let narrow = SamplingParams { temperature: 0.3, top_k: 2, seed: 7, ..greedy.clone() };
    let told = SamplingParams { logprobs: Some(3), ..greedy.clone() };
    let penalised = SamplingParams {
        temperature: 0.6,
        top_k: 3,
        frequency_penalty: 0.02,
        repetition_penalty: 1.01,
        seed: 3,
        ..greedy.clone()
    };
    let mut requests: Vec<_> = [greedy, narrow, told, penalised]
        .into_iter()
        .zip(0..)
        .map(|(sampling, salt)| GenerateRequest { sampling, ..request(prompt(salt), 120) })
        .collect();
    // A sequence that may end, but not early.
    let ends = requests[0].clone();
    let eos_ids: Arc<[u32]> = (0..vocabulary).step_by(3).collect();
    requests.push(GenerateRequest { eos_ids, min_tokens: 60, ..ends });
    requests
}

/// Every event of each request, and the engine's statistics when all are done.
fn events(engine: &EngineHandle, together: bool) -> (Vec<Vec<SequenceEvent>>, EngineStats) {
    let submit = |request| engine.submit(request).unwrap().1;
    // How much of a prompt is found again depends on the blocks that are left.
    let without_hits = |event| match event {
        SequenceEvent::Finished(finished) => {
            SequenceEvent::Finished(Finished { cached_tokens: 0, ..finished })
        }
        event => event,
    };
    let read = |mut events: mpsc::Receiver<SequenceEvent>| {
        let events = std::iter::from_fn(|| events.blocking_recv());
        events.map(without_hits).collect::<Vec<_>>()
    };
    let all = if together {
        let receivers: Vec<_> = requests().into_iter().map(submit).collect();
        receivers.into_iter().map(read).collect()
    } else {
        requests().into_iter().map(|request| read(submit(request))).collect()
    };
    wait_for(engine, "idle", |stats| stats.running + stats.blocks_used == 0);
    (all, engine.stats())
}

#[test]
fn drafts_change_no_token_and_no_probability() {
    let (expect, without) = events(&engine(0, 400), false);
    assert_eq!(without.draft_tokens, 0);
    let (mut right, mut wrong, mut rounds) = (0, 0, 0);
    // How many drafts there are depends on the measured times.
    while right == 0 || wrong == 0 {
        for (together, blocks) in [(false, 400), (true, 400), (true, 90)] {
            let (found, stats) = events(&engine(DRAFTS, blocks), together);
            assert!(found == expect, "together {together}, {blocks} blocks: {stats:?}");
            right += stats.accepted_tokens;
            wrong += stats.draft_tokens - stats.accepted_tokens;
            assert_eq!(stats.generated_tokens, without.generated_tokens);
            if !together {
                assert!(stats.steps + stats.accepted_tokens == without.steps, "{stats:?}");
            }
        }
        rounds += 1;
        assert!(rounds < 20, "{right} drafts were right and {wrong} were wrong");
    }
}

/// A device with two steps in flight does not know the last token, so it gets no drafts.
#[test]
fn two_steps_in_flight_leave_no_drafts() {
    let options = EngineOptions { speculative_tokens: DRAFTS, ..options() };
    let runner = ScriptedRunner::repeating(vec![1, 2, 3]).depth(2);
    let engine = EngineHandle::start(Box::new(runner), options);
    let (tokens, _) = collect(engine.submit(request(0..4, 30)).unwrap().1);
    assert_eq!(tokens.len(), 30);
    assert_eq!(engine.stats().draft_tokens, 0);
}

/// A cancelled sequence gives back the blocks of its drafts too.
#[test]
fn a_stop_frees_the_blocks_of_drafts() {
    let options = EngineOptions { speculative_tokens: DRAFTS, ..options() };
    let step = Duration::from_millis(2);
    let runner = ScriptedRunner::repeating(vec![1, 2, 3]).step_time(step);
    let engine = EngineHandle::start(Box::new(runner), options);
    let (id, events) = engine.submit(request(0..4, 120)).unwrap();
    wait_for(&engine, "drafts", |stats| stats.accepted_tokens > 8);
    engine.stop(id);
    let (tokens, finished) = collect(events);
    assert!(tokens.iter().zip([1, 2, 3].iter().cycle()).all(|(a, b)| a == b));
    assert!(matches!(finished.cause, StopCause::Stopped | StopCause::Length));
    wait_for(&engine, "idle", |stats| stats.running + stats.blocks_used == 0);
}

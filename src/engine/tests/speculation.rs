//! Drafts change no token, whatever the sampling, and the blocks of wrong ones are computed again.

use super::*;
use crate::model_runner::ModelRunner;
use crate::testing::ScriptedRunner;
use cresset_models::testing::tiny_llama_gguf;
use cresset_models::{ModelOptions, ModelSource};

const DRAFTS: usize = 8;

/// An engine around a model whose cache has `num_blocks` blocks of 4 tokens in each group of
/// layers, and at most `states` states, and the size of its vocabulary.
fn engine(
    source: &ModelSource,
    speculative_tokens: usize,
    num_blocks: usize,
    states: usize,
) -> (EngineHandle, u32) {
    let mut options =
        EngineOptions { speculative_tokens, max_rows: 4, max_context: 192, ..super::options() };
    let loaded = ModelOptions {
        threads: 2,
        dequantise: false,
        kv_bytes: 8 << 20,
        state_tokens: 8,
        block_size: options.block_size,
        max_batched_tokens: options.max_batched_tokens,
        max_context: Some(options.max_context),
        ..ModelOptions::default()
    };
    let (runner, info) = ModelRunner::load(source, &loaded).unwrap();
    options.cache = info.cache;
    options.num_blocks = num_blocks * options.cache.windows.len();
    assert!(options.num_blocks <= info.num_blocks);
    options.cache.states = options.cache.states.min(states);
    (EngineHandle::start(Box::new(runner), options), info.config.vocab_size as u32)
}

/// Requests whose text repeats itself, so that there are drafts, and is drawn in different ways, so
/// that some of them are wrong.
fn requests(vocabulary: u32) -> Vec<GenerateRequest> {
    let prompt = |salt: u32| (0..48).map(move |i| (i % 12 * 7 + salt) % vocabulary);
    // Of two tokens one is drawn, so that what stood before is often right and often wrong.
    let logit_bias = Arc::new([(3, 30.0), (7, 30.0)]);
    let greedy = SamplingParams { temperature: 0.0, logit_bias, ..SamplingParams::default() };
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
pub fn events(
    engine: &EngineHandle,
    requests: Vec<GenerateRequest>,
    together: bool,
) -> (Vec<Vec<SequenceEvent>>, EngineStats) {
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
        let receivers: Vec<_> = requests.into_iter().map(submit).collect();
        receivers.into_iter().map(read).collect()
    } else {
        requests.into_iter().map(|request| read(submit(request))).collect()
    };
    wait_for(engine, "idle", |stats| stats.running + stats.blocks_used == 0);
    (all, engine.stats())
}

#[test]
fn drafts_change_no_token_and_no_probability() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_llama_gguf(&path, 3).unwrap();
    check_drafts(&ModelSource::gguf(path));
}

/// The layers of these models keep states, which a wrong draft must not change.
#[test]
fn drafts_change_no_token_of_a_model_with_states() {
    for name in ["lfm2", "qwen3.5", "granite-hybrid-dense"] {
        let folder = tempfile::tempdir().unwrap();
        check_drafts(&golden_model(name, folder.path(), 192));
    }
}

fn check_drafts(source: &ModelSource) {
    let events = |(engine, vocabulary): (EngineHandle, u32), together| {
        events(&engine, requests(vocabulary), together)
    };
    let (expect, without) = events(engine(source, 0, 400, 400), false);
    assert_eq!(without.draft_tokens, 0);
    let (mut right, mut wrong, mut rounds) = (0, 0, 0);
    // How many drafts there are depends on the measured times.
    while right == 0 || wrong == 0 {
        for (together, blocks, states) in [(false, 400, 400), (true, 400, 400), (true, 90, 10)] {
            let (found, stats) = events(engine(source, DRAFTS, blocks, states), together);
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

/// A cancelled sequence gives back the blocks of its drafts too, and their states.
#[test]
fn a_stop_frees_the_blocks_of_drafts() {
    let cache = CacheKinds { states: 40, first_kept: 8, ..CacheKinds::default() };
    let options = EngineOptions { speculative_tokens: DRAFTS, cache, ..options() };
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

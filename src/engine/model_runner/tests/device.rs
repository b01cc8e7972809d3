//! The whole engine over a GPU (or the emulator, if there is none): against the CPU, and against
//! itself with other sequences in the batch.

use crate::model_runner::*;
use crate::tests::{collect, golden_model, request, wait_for};
use crate::{
    EngineHandle, EngineOptions, EngineStats, GenerateRequest, SequenceEvent, StopCause,
    TokenLogprobs,
};
use cresset_kernels::gpu::{Emulator, device_or_emulator};
use cresset_kernels::sampling::params::SamplingParams;
use cresset_models::cache_kinds::CacheKinds;
use cresset_models::testing::{tiny_llama_gguf, vocab_size};
use std::path::Path;
use tokio::sync::mpsc::Receiver;

const BLOCK: usize = 16;

fn engine_options() -> EngineOptions {
    EngineOptions {
        max_batched_tokens: 64,
        background_tokens: 16,
        max_rows: 8,
        max_waiting: 32,
        block_size: BLOCK,
        num_blocks: 64,
        cache: CacheKinds::default(),
        max_context: 128,
        speculative_tokens: 0,
    }
}

fn runner_options(options: &EngineOptions, on: ModelOptions) -> ModelOptions {
    ModelOptions {
        threads: 1,
        dequantise: false,
        kv_bytes: 16 << 20,
        state_tokens: BLOCK,
        block_size: BLOCK,
        max_batched_tokens: options.max_batched_tokens,
        max_context: Some(options.max_context),
        ..on
    }
}

fn on_gpu(deterministic: bool) -> ModelOptions {
    let gpu = device_or_emulator(24 << 20, 4);
    let gpu_memory_share = (f64::from(1 << 30) / gpu.properties().memory_bytes as f64).min(0.5);
    ModelOptions {
        gpu: Some(gpu),
        gpu_memory_share,
        gpu_reserve_mib: 0,
        deterministic,
        max_rows: 8,
        gpu_graph_rows: 8,
        ..ModelOptions::default()
    }
}

fn start(options: &EngineOptions, runner: &ModelOptions) -> EngineHandle {
    let folder = tempfile::tempdir().unwrap();
    start_model(&tiny_llama(folder.path()), options, runner)
}

fn tiny_llama(folder: &Path) -> ModelSource {
    let path = folder.join("tiny.gguf");
    tiny_llama_gguf(&path, 3).unwrap();
    ModelSource::gguf(path)
}

fn start_model(source: &ModelSource, options: &EngineOptions, on: &ModelOptions) -> EngineHandle {
    let (runner, info) = ModelRunner::load(source, on).unwrap();
    let num_blocks = options.num_blocks * info.cache.windows.len();
    assert!(info.num_blocks >= num_blocks);
    let options = EngineOptions { num_blocks, cache: info.cache, ..options.clone() };
    EngineHandle::start(Box::new(runner), options)
}

/// Prompts of various lengths, each with other sampling parameters.
fn requests() -> Vec<GenerateRequest> {
    let plain = SamplingParams { seed: 7, ..SamplingParams::default() };
    let ways = [
        SamplingParams { temperature: 0.0, ..plain.clone() },
        SamplingParams {
            temperature: 0.8,
            top_p: 0.9,
            top_k: 20,
            logprobs: Some(4),
            ..plain.clone()
        },
        SamplingParams {
            repetition_penalty: 1.3,
            frequency_penalty: 0.4,
            presence_penalty: 0.2,
            ..plain.clone()
        },
        SamplingParams { min_p: 0.02, logit_bias: [(5, 3.0), (9, -4.0)].into(), ..plain },
    ];
    let prompt = |i: u32| (0..7 + 13 * i).map(move |token| (token * 31 + i) % 40);
    let one = |(i, sampling)| GenerateRequest { sampling, min_tokens: 3, ..request(prompt(i), 9) };
    (0..).zip(ways).map(one).collect()
}

#[test]
fn the_gpu_gives_the_tokens_of_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    check_tokens(&tiny_llama(folder.path()));
}

/// Contexts are up to seven times as long as the windows; in the first model all layers have one.
#[test]
fn the_gpu_gives_the_tokens_of_the_cpu_beyond_windows() {
    for name in ["mistral-window", "gemma3-odd", "gemma4-inputs", "gpt-oss"] {
        let folder = tempfile::tempdir().unwrap();
        check_tokens(&golden_model(name, folder.path(), 128));
    }
}

fn check_tokens(source: &ModelSource) {
    let output = |on| {
        let runner = ModelOptions { dequantise: true, ..runner_options(&engine_options(), on) };
        let engine = start_model(source, &engine_options(), &runner);
        let events: Vec<_> =
            requests().into_iter().map(|request| engine.submit(request).unwrap().1).collect();
        events.into_iter().map(|events| collect(events).0).collect::<Vec<_>>()
    };
    let cpu = output(ModelOptions::default());
    assert!(cpu.iter().all(|tokens| tokens.len() == 9));
    assert_eq!(output(on_gpu(false)), cpu);
}

/// A request's tokens with their log-probabilities, to the bit.
fn bits(mut events: Receiver<SequenceEvent>) -> Vec<(u32, u32, Vec<(u32, u32)>)> {
    let mut output = Vec::new();
    loop {
        match events.blocking_recv().unwrap() {
            SequenceEvent::Started => (),
            SequenceEvent::Token { id, logprobs } => {
                let TokenLogprobs { chosen, top } = logprobs.unwrap();
                output.push((
                    id,
                    chosen.to_bits(),
                    top.into_iter().map(|(id, p)| (id, p.to_bits())).collect(),
                ));
            }
            SequenceEvent::Finished(finished) => {
                assert_eq!(finished.cause, StopCause::Length);
                return output;
            }
        }
    }
}

/// What happened to a request: its results at first and when it was made again, and the engine's
/// counts.
struct Outcome {
    first: Vec<(u32, u32, Vec<(u32, u32)>)>,
    again: Vec<(u32, u32, Vec<(u32, u32)>)>,
    stats: EngineStats,
}

/// Runs a request in bf16 with `deterministic`, beside some others of which every fourth is
/// cancelled.
fn outcome(source: &ModelSource, options: &EngineOptions, neighbours: u32) -> Outcome {
    let plain = SamplingParams {
        seed: 42,
        temperature: 0.9,
        logprobs: Some(5),
        ..SamplingParams::default()
    };
    let sampling = SamplingParams {
        repetition_penalty: 1.2,
        frequency_penalty: 0.3,
        presence_penalty: 0.1,
        ..plain
    };
    let probe = || GenerateRequest { sampling: sampling.clone(), ..request(0..37, 24) };
    let neighbour = |i: u32| request((0..i * 9 % 37).chain(i..i + 5), 30);
    let engine = start_model(source, options, &runner_options(options, on_gpu(true)));
    let others: Vec<_> = (0..neighbours).map(|i| engine.submit(neighbour(i)).unwrap()).collect();
    let events = engine.submit(probe()).unwrap().1;
    others.iter().step_by(4).for_each(|(id, _)| engine.stop(*id));
    let first = bits(events);
    let again = bits(engine.submit(probe()).unwrap().1);
    drop(others);
    wait_for(&engine, "idle", |stats| stats.running + stats.blocks_used == 0);
    Outcome { first, again, stats: engine.stats() }
}

/// In chunks of few tokens, and with so few blocks that sequences are preempted.
fn cramped() -> [(&'static str, EngineOptions, fn(&EngineStats) -> bool); 2] {
    let chunked = EngineOptions { max_batched_tokens: 12, ..engine_options() };
    let few_blocks = EngineOptions { num_blocks: 6, ..engine_options() };
    [
        ("chunking", chunked, |stats| stats.steps > 40),
        ("preemption", few_blocks, |stats| stats.preemptions > 0),
    ]
}

/// Alone, with a prefix hit, and beside others in each of these ways.
fn check_bits(
    name: &str,
    source: &ModelSource,
    ways: impl IntoIterator<Item = (&'static str, EngineOptions, fn(&EngineStats) -> bool)>,
) {
    let alone = outcome(source, &engine_options(), 0);
    let expect = alone.first;
    assert!(expect.len() == 24 && alone.again == expect, "{name}");
    assert!(alone.stats.prefix_hit_tokens > 0, "{name}");
    for (what, options, happened) in ways {
        let Outcome { first, again, stats } = outcome(source, &options, 5);
        assert!(first == expect && again == expect, "{name}: {what} changed what it says");
        assert!(happened(&stats), "{name}: {what} did not happen: {stats:?}");
    }
}

#[test]
fn neighbours_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    let beside: (_, _, fn(&EngineStats) -> bool) =
        ("neighbours", engine_options(), |stats| stats.preemptions == 0);
    check_bits("tiny llama", &tiny_llama(folder.path()), cramped().into_iter().chain([beside]));
}

/// Heads of other sizes per layer and layers that read the K and V of others; sinks; latent
/// attention; and the three kinds of recurrences.
#[test]
fn neighbours_change_no_bit_of_any_kind_of_layer() {
    let windows = ["gemma4-inputs", "gpt-oss", "mistral-window"];
    let others = ["deepseek-v3", "lfm2", "qwen3.5", "granite-hybrid"];
    for name in windows.into_iter().chain(others) {
        let folder = tempfile::tempdir().unwrap();
        let source = golden_model(name, folder.path(), 128);
        check_bits(name, &source, cramped());
    }
}

/// Six of seven layers have a window of eight tokens.
#[test]
fn windows_make_room_for_longer_contexts() {
    const MOST: usize = 1 << 13;
    let folder = tempfile::tempdir().unwrap();
    let source = golden_model("gemma3", folder.path(), MOST);
    let options = EngineOptions { max_context: MOST, ..engine_options() };
    let on = ModelOptions { gpu_kv_mib: 1, ..on_gpu(false) };
    let (runner, info) = ModelRunner::load(&source, &runner_options(&options, on)).unwrap();
    let without_windows = (1 << 20) / info.config.kv_block_bytes(1);
    let options = EngineOptions { num_blocks: info.num_blocks, cache: info.cache, ..options };
    let longest = options.longest_within(MOST);
    assert!(longest > 5 * without_windows && longest < MOST, "{longest} of {without_windows}");
    let engine = EngineHandle::start(Box::new(runner), options);
    assert_eq!(engine.stats().blocks_total, info.num_blocks);
}

#[test]
fn a_row_that_cannot_be_sampled_fails_alone() {
    let engine = start(&engine_options(), &runner_options(&engine_options(), on_gpu(false)));
    let mut bad = request(0..5, 4);
    bad.sampling.logit_bias = [(vocab_size() as u32, 1.0)].into();
    let [bad, good] = [bad, request(0..5, 4)].map(|request| engine.submit(request).unwrap().1);
    let StopCause::Failed(reason) = collect(bad).1.cause else {
        panic!("a token outside the vocabulary has a logit")
    };
    assert!(reason.to_string().contains("logit_bias"), "{reason}");
    assert_eq!(reason.kind(), "sampling");
    assert_eq!(collect(good).0.len(), 4);
}

#[test]
fn a_gpu_without_room_is_refused_at_load() {
    let on = ModelOptions {
        gpu: Some(Emulator::with(24 << 20, 4)),
        gpu_memory_share: 0.001,
        ..on_gpu(false)
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_llama_gguf(&path, 3).unwrap();
    let error = ModelRunner::load(&ModelSource::gguf(path), &runner_options(&engine_options(), on));
    let error = error.err().unwrap();
    assert!(error.to_string().contains("no room for the KV cache"), "{error}");
    assert_eq!(error.kind(), "out_of_memory");
}

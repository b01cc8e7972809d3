//! The whole engine over a GPU (or the emulator, if there is none): against the CPU, and against
//! itself with other sequences in the batch.

use crate::engine::model_runner::*;
use crate::engine::tests::{collect, request, wait_for};
use crate::engine::{
    EngineHandle, EngineOptions, GenerateRequest, SequenceEvent, StopCause, TokenLogprobs,
};
use cresset_kernels::gpu::{Emulator, device_or_emulator};
use cresset_kernels::sampling::params::SamplingParams;
use cresset_models::cache_kinds::CacheKinds;
use cresset_models::testing::{tiny_llama_gguf, vocab_size};
use tokio::sync::mpsc::Receiver;

const BLOCK: usize = 16;

fn engine_options() -> EngineOptions {
    EngineOptions {
        max_batched_tokens: 64,
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
        deterministic,
        max_rows: 8,
        gpu_graph_rows: 8,
        ..ModelOptions::default()
    }
}

fn start(options: EngineOptions, runner: &ModelOptions) -> EngineHandle {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_llama_gguf(&path, 3).unwrap();
    let (runner, info) = ModelRunner::load(&ModelSource::gguf(path), runner).unwrap();
    assert!(info.num_blocks >= options.num_blocks);
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
    let prompt = |i: u32| (0..7 + 13 * i).map(move |token| (token * 31 + i) % vocab_size() as u32);
    let one = |(i, sampling)| GenerateRequest { sampling, min_tokens: 3, ..request(prompt(i), 9) };
    (0..).zip(ways).map(one).collect()
}

#[test]
fn the_gpu_gives_the_tokens_of_the_cpu() {
    let output = |on| {
        let runner = ModelOptions { dequantise: true, ..runner_options(&engine_options(), on) };
        let engine = start(engine_options(), &runner);
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

/// In bf16 with `deterministic`: alone, beside other requests, in chunks, preempted, beside
/// cancelled ones, with a prefix hit.
#[test]
fn neighbours_change_no_bit() {
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
    let output = |options: EngineOptions, neighbours: u32| {
        let engine = start(options.clone(), &runner_options(&options, on_gpu(true)));
        let others: Vec<_> =
            (0..neighbours).map(|i| engine.submit(neighbour(i)).unwrap()).collect();
        let events = engine.submit(probe()).unwrap().1;
        others.iter().step_by(4).for_each(|(id, _)| engine.stop(*id));
        let first = bits(events);
        let again = bits(engine.submit(probe()).unwrap().1);
        drop(others);
        wait_for(&engine, "idle", |stats| stats.running + stats.blocks_used == 0);
        (first, again, engine.stats())
    };
    let (expect, again, stats) = output(engine_options(), 0);
    assert!(expect.len() == 24 && again == expect && stats.prefix_hit_tokens > 0);
    let check = |what: &str, options: EngineOptions, happened: fn(u64, u64) -> bool| {
        let (first, again, stats) = output(options, 5);
        assert!(first == expect && again == expect, "{what} changed what the request says");
        assert!(happened(stats.steps, stats.preemptions), "{what} did not happen: {stats:?}");
    };
    check("neighbours", engine_options(), |_, preemptions| preemptions == 0);
    check("chunking", EngineOptions { max_batched_tokens: 12, ..engine_options() }, |steps, _| {
        steps > 40
    });
    check("preemption", EngineOptions { num_blocks: 8, ..engine_options() }, |_, preemptions| {
        preemptions > 0
    });
}

#[test]
fn a_row_that_cannot_be_sampled_fails_alone() {
    let engine = start(engine_options(), &runner_options(&engine_options(), on_gpu(false)));
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

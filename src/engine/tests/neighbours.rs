//! One request, the probe, gives the same bits beside any other requests: it is run among random
//! mixes of them, on the kernels' own path in its default configuration, with a tiny model.
//!
//! The loop below is that of the engine thread without the thread, so that the test can tell
//! exactly what happened to the probe.

use super::ahead::Ahead;
use super::*;
use crate::engine::batch::forward_batch;
use crate::engine::model_runner::ModelRunner;
use crate::engine::runner::Runner;
use crate::engine::scheduler::{ScheduledStep, Scheduler};
use cresset_kernels::sampling::philox4x32;
use cresset_models::cache_kinds::CacheKinds;
use cresset_models::testing::{tiny_llama_gguf, vocab_size};
use cresset_models::{ModelOptions, ModelSource};

const BLOCK: usize = 16;
const BLOCKS: usize = 800;
const CONTEXT: usize = 256;
const PROBE: SequenceId = SequenceId(1_000);
const PROMPT: u32 = 67;
const OUTPUT: u32 = 48;

fn runner(depth: usize, threads: usize) -> Box<dyn Runner> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_llama_gguf(&path, 3).unwrap();
    let options = ModelOptions {
        threads,
        dequantise: false,
        kv_bytes: 64 << 20,
        block_size: BLOCK,
        max_batched_tokens: 512,
        max_context: Some(CONTEXT),
        ..ModelOptions::default()
    };
    let (runner, info) = ModelRunner::load(&ModelSource::gguf(path), &options).unwrap();
    assert!(info.num_blocks >= BLOCKS);
    Ahead::wrap(depth, runner)
}

/// A random mix of neighbours. Everything in it follows from its number.
struct Mix {
    number: u32,
    draws: u32,
}

impl Mix {
    fn below(&mut self, bound: u32) -> u32 {
        self.draws += 1;
        philox4x32([self.draws, 0, 0, 7], [self.number, 0])[0] % bound
    }

    fn pick(&mut self, from: &[usize]) -> usize {
        from[self.below(from.len() as u32) as usize]
    }

    /// Chooses the engine's options, and how many neighbours arrive in a turn before the probe and
    /// after it: the later ones are preempted first when blocks run out. A third of the mixes has
    /// little cache, a third many rows, and a third any options.
    fn scene(&mut self) -> (EngineOptions, [u32; 2]) {
        let (max_batched_tokens, max_rows, num_blocks, arrivals) = match self.number % 3 {
            0 => (64, 16, self.pick(&[16, 20, 24]), [4, 1]),
            1 => (512, 96, BLOCKS, [16, 16]),
            _ => (self.pick(&[24, 64, 200]), self.pick(&[4, 16]), self.pick(&[26, BLOCKS]), [6, 6]),
        };
        let options = EngineOptions {
            max_batched_tokens,
            max_rows,
            max_waiting: 0,
            block_size: BLOCK,
            num_blocks,
            cache: CacheKinds::default(),
            max_context: CONTEXT,
            speculative_tokens: 2 * (self.number as usize % 5),
        };
        (options, arrivals)
    }

    /// A request of one of three accounts; some begin with a part of the probe's prompt.
    fn neighbour(&mut self) -> GenerateRequest {
        let shared = self.below(2) * self.below(PROMPT + 1);
        // If the cache is small, prompts are short and outputs long, so that it fills up on the
        // way.
        let grows = self.number.is_multiple_of(3);
        let own = 1 + self.below(if grows { 9 } else { 60 });
        let from = self.below(vocab_size() as u32);
        let tokens = (0..shared).chain(from..from + own).map(|token| token % vocab_size() as u32);
        let sampling = SamplingParams {
            temperature: self.below(3) as f32 * 0.6,
            top_k: self.below(2) * self.below(9),
            top_p: 1.0 - self.below(2) as f32 * 0.2,
            repetition_penalty: 1.0 + self.below(2) as f32 * 0.3,
            seed: self.below(1_000).into(),
            logprobs: Some(3).filter(|_| self.below(2) == 0),
            ..SamplingParams::default()
        };
        let account = AccountId(Uuid::from_u128(self.below(3).into()));
        let max_tokens = 1 + self.below(70) + if grows { 60 } else { 0 };
        GenerateRequest {
            account,
            priority: self.below(3) as u8,
            sampling,
            ..request(tokens, max_tokens)
        }
    }
}

fn probe() -> GenerateRequest {
    let sampling = SamplingParams {
        seed: 42,
        temperature: 0.9,
        top_p: 0.97,
        frequency_penalty: 0.2,
        logprobs: Some(5),
        ..SamplingParams::default()
    };
    GenerateRequest {
        sampling,
        ..request((0..PROMPT).map(|token| token % vocab_size() as u32), OUTPUT)
    }
}

/// The events that the probe went through in a mix.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    preempted: usize,
    /// Rows that computed more than one of the probe's tokens.
    chunks: usize,
    cached: u32,
    /// Most rows in a step that computed the probe.
    most_rows: usize,
    /// Neighbours that were cancelled while the probe ran.
    cancelled: usize,
}

/// The probe's tokens and the bits of their log-probabilities.
type ProbeOutput = Vec<(u32, u32, Vec<(u32, u32)>)>;

struct Stage<'a> {
    runner: &'a mut dyn Runner,
    scheduler: Scheduler,
    output: ProbeOutput,
    seen: Seen,
}

impl<'a> Stage<'a> {
    fn new(runner: &'a mut dyn Runner, options: EngineOptions) -> Self {
        // The previous mix may have left a step in flight.
        runner.recover().unwrap();
        let speculative_tokens = if runner.depth() == 1 { options.speculative_tokens } else { 0 };
        let options = EngineOptions { speculative_tokens, ..options };
        Self {
            runner,
            scheduler: Scheduler::new(options, [9; 32]),
            output: ProbeOutput::new(),
            seen: Seen::default(),
        }
    }

    /// Runs one turn of the loop. False once the probe has ended.
    fn step(&mut self) -> bool {
        let step = self.scheduler.schedule();
        self.look(&step);
        if !step.rows.is_empty() {
            let (batch, rows) = forward_batch(&self.scheduler, &step);
            self.runner.launch(&batch, &rows).unwrap();
        }
        let more = !step.rows.is_empty() && self.scheduler.in_flight().len() < self.runner.depth();
        let going = more || self.collect();
        self.scheduler.check_integrity().unwrap();
        going
    }

    fn collect(&mut self) -> bool {
        let results = self.runner.collect().unwrap();
        let mut going = true;
        let rows = self.scheduler.commit_step();
        let ids = rows.iter().flat_map(|row| std::iter::repeat_n(row.id, row.results()));
        for (id, sampled) in ids.zip(results) {
            if !self.scheduler.awaits(id) {
                continue;
            }
            let sampled = sampled.unwrap();
            if id == PROBE {
                let logprobs = sampled.logprobs.unwrap();
                let top =
                    logprobs.top.iter().map(|(id, logprob)| (*id, logprob.to_bits())).collect();
                self.output.push((sampled.token, logprobs.chosen.to_bits(), top));
            }
            if let Some(cause) = self.scheduler.append(id, sampled.token) {
                let finished = self.scheduler.finish(id, cause).unwrap();
                if id == PROBE {
                    self.seen.cached = finished.cached_tokens;
                    going = false;
                }
            }
        }
        going
    }

    fn look(&mut self, step: &ScheduledStep) {
        self.seen.preempted += usize::from(step.preempted.contains(&PROBE));
        if let Some(row) = step.rows.iter().find(|row| row.id == PROBE) {
            self.seen.chunks += usize::from(row.num_tokens > 1);
            self.seen.most_rows = self.seen.most_rows.max(step.rows.len());
        }
    }
}

fn alone(runner: &mut dyn Runner) -> ProbeOutput {
    let options =
        EngineOptions { num_blocks: BLOCKS, max_context: CONTEXT, block_size: BLOCK, ..options() };
    let mut stage = Stage::new(runner, EngineOptions { max_batched_tokens: 512, ..options });
    stage.scheduler.add(PROBE, probe());
    while stage.step() {}
    stage.output
}

fn among_neighbours(runner: &mut dyn Runner, number: u32) -> (ProbeOutput, Seen) {
    let mut mix = Mix { number, draws: 0 };
    let (options, arrivals) = mix.scene();
    let mut stage = Stage::new(runner, options);
    let arrives = mix.below(30);
    // Ids rise in order of arrival, and the probe's is in the middle of them.
    let (mut before, mut after, mut live) = (0, PROBE.0, Vec::new());
    for turn in 0.. {
        let arrived = turn >= arrives;
        for _ in 0..mix.below(arrivals[usize::from(arrived)]) {
            let id = if arrived { &mut after } else { &mut before };
            *id += 1;
            if live.len() < 100 {
                stage.scheduler.add(SequenceId(*id), mix.neighbour());
                live.push(SequenceId(*id));
            }
        }
        if turn == arrives {
            stage.scheduler.add(PROBE, probe());
        }
        if mix.below(4) == 0 && !live.is_empty() {
            let id = live.swap_remove(mix.below(live.len() as u32) as usize);
            let stopped = stage.scheduler.finish(id, StopCause::Stopped).is_some();
            stage.seen.cancelled += usize::from(arrived && stopped);
        }
        if !stage.scheduler.is_empty() && !stage.step() {
            return (stage.output, stage.seen);
        }
        live.retain(|id| stage.scheduler.get(*id).is_some());
    }
    unreachable!("the probe ends");
}

fn check(mixes: u32) {
    let expect = alone(&mut *runner(1, 2));
    assert_eq!(expect.len(), OUTPUT as usize);
    for threads in [1, 3] {
        assert_eq!(
            alone(&mut *runner(1, threads)),
            expect,
            "after a restart with {threads} threads"
        );
    }
    check_mixes(&mut *runner(1, 2), 0..mixes, &expect);
    check_mixes(&mut *runner(2, 2), mixes..2 * mixes, &expect);
}

fn check_mixes(runner: &mut dyn Runner, mixes: std::ops::Range<u32>, expect: &ProbeOutput) {
    let mut all = Vec::new();
    for number in mixes {
        let (output, seen) = among_neighbours(runner, number);
        assert!(output == *expect, "mix {number} changed the output of the probe: {seen:?}");
        all.push(seen);
    }
    let happened = |what: &str, test: &dyn Fn(&Seen) -> bool| {
        assert!(all.iter().any(test), "never {what}: {all:?}");
    };
    happened("preempted twice", &|seen| seen.preempted >= 2);
    happened("chunked", &|seen| seen.chunks >= 3);
    happened("a full prefix hit", &|seen| seen.cached == PROMPT / BLOCK as u32 * BLOCK as u32);
    happened("a partial prefix hit", &|seen| (1..PROMPT - BLOCK as u32).contains(&seen.cached));
    happened("no prefix hit", &|seen| seen.cached == 0);
    happened("in a batch of 64", &|seen| seen.most_rows >= 64);
    happened("beside cancelled neighbours", &|seen| seen.cancelled >= 3);
}

#[test]
fn neighbours_change_no_bit() {
    check(60);
}

#[test]
#[ignore = "the same fifty times longer"]
fn three_thousand_mixes_change_no_bit() {
    check(3_000);
}

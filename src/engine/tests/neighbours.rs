//! One request, the probe, gives the same bits beside any other requests: it is run among random
//! mixes of them, on the kernels' own path in its default configuration, with tiny models.
//!
//! The loop below is that of the engine thread without the thread, so that the test can tell
//! exactly what happened to the probe.

use super::ahead::Ahead;
use super::formats::Thirds;
use super::own_guesses::source_of;
use super::*;
use crate::batch::{forward_batch, known_rows};
use crate::grammar::TokenGrammar;
use crate::model_runner::ModelRunner;
use crate::own_guesses::OwnHead;
use crate::runner::Runner;
use crate::scheduler::{ScheduledStep, Scheduler};
use crate::speculation::{DraftCost, Proposer};
use cresset_kernels::sampling::{RowSampling, philox4x32};
use cresset_models::cache_kinds::CacheKinds;
use cresset_models::testing::{guess_goldens, tiny_llama_gguf};
use cresset_models::{ModelOptions, ModelSource};

const BLOCK: usize = 16;
const BLOCKS: usize = 800;
const CONTEXT: usize = 256;
const PROBE: SequenceId = SequenceId(1_000);
const PROMPT: u32 = 67;
const OUTPUT: u32 = 48;

/// A model, and what of it requests and options must fit.
struct Subject {
    runner: Box<dyn Runner>,
    cache: CacheKinds,
    vocabulary: u32,
}

impl Subject {
    fn load(source: &ModelSource, depth: usize, threads: usize) -> Self {
        Self::load_as(source, depth, ModelOptions { threads, ..ModelOptions::default() })
    }

    fn load_as(source: &ModelSource, depth: usize, options: ModelOptions) -> Self {
        let options = ModelOptions {
            dequantise: false,
            kv_bytes: 64 << 20,
            state_tokens: BLOCK,
            block_size: BLOCK,
            max_batched_tokens: 512,
            max_context: Some(CONTEXT),
            ..options
        };
        let (runner, info) = ModelRunner::load(source, &options).unwrap();
        assert!(info.num_blocks >= BLOCKS * info.cache.windows.len());
        let (runner, vocabulary) = (Ahead::wrap(depth, runner), info.config.vocab_size as u32);
        Self { runner, cache: info.cache, vocabulary }
    }

    fn tiny(depth: usize, threads: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        tiny_llama_gguf(&path, 3).unwrap();
        Self::load(&ModelSource::gguf(path), depth, threads)
    }

    fn family(name: &str, depth: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self::load(&golden_model(name, folder.path(), CONTEXT), depth, 2)
    }

    /// A model with recurrent layers, experts and a head that guesses its tokens, or without it.
    fn with_head(guesses: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut cases = guess_goldens().unwrap().into_iter();
        let case = cases.find(|case| case.model.name == "qwen3.5-moe").unwrap();
        let source = source_of(&case, folder.path(), CONTEXT);
        Self::load_as(&source, 1, ModelOptions { guesses, ..ModelOptions::default() })
    }

    fn prompt(&self) -> impl Iterator<Item = u32> {
        let vocabulary = self.vocabulary;
        (0..PROMPT).map(move |token| token % vocabulary)
    }
}

/// A random mix of neighbours. Everything in it follows from its number and the model.
struct Mix {
    number: u32,
    draws: u32,
    vocabulary: u32,
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
    fn scene(&mut self, cache: &CacheKinds) -> (EngineOptions, [u32; 2]) {
        let (max_batched_tokens, max_rows, num_blocks, arrivals) = match self.number % 3 {
            0 => (64, 16, self.pick(&[16, 20, 24]), [4, 1]),
            1 => (512, 96, BLOCKS, [16, 16]),
            _ => (self.pick(&[24, 64, 200]), self.pick(&[4, 16]), self.pick(&[26, BLOCKS]), [6, 6]),
        };
        let states = match (cache.states, self.number % 3) {
            (0, _) | (_, 1) => cache.states,
            _ => self.pick(&[30, 60, cache.states]).min(cache.states),
        };
        let options = EngineOptions {
            max_batched_tokens,
            background_tokens: 1 + self.number as usize % 20,
            max_rows,
            max_waiting: 0,
            block_size: BLOCK,
            num_blocks: num_blocks * cache.windows.len(),
            cache: CacheKinds { states, ..cache.clone() },
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
        let vocabulary = self.vocabulary;
        let from = self.below(vocabulary);
        let tokens = (0..shared).chain(from..from + own).map(|token| token % vocabulary);
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
            background: self.number % 4 == 1 && self.below(2) == 0,
            sampling,
            grammar: (self.draws.is_multiple_of(3))
                .then(|| Arc::new(Thirds) as Arc<dyn TokenGrammar>),
            ..request(tokens, max_tokens)
        }
    }
}

/// A request whose output prefers few tokens, so that some of it recurs with any model and drafts
/// are tried.
fn probe(subject: &Subject) -> GenerateRequest {
    let sampling = SamplingParams {
        seed: 42,
        temperature: 0.9,
        top_p: 0.97,
        frequency_penalty: 0.2,
        logit_bias: Arc::from([7, 11, 18, 26].map(|token| (token, 5.0))),
        logprobs: Some(5),
        ..SamplingParams::default()
    };
    GenerateRequest { sampling, ..request(subject.prompt(), OUTPUT) }
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
    /// Drafts of the probe's tokens.
    drafts: usize,
}

/// The probe's tokens and the bits of their log-probabilities.
type ProbeOutput = Vec<(u32, u32, Vec<(u32, u32)>)>;

struct Stage<'a> {
    runner: &'a mut dyn Runner,
    scheduler: Scheduler,
    output: ProbeOutput,
    seen: Seen,
    head_cost: DraftCost,
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
            head_cost: DraftCost::default(),
        }
    }

    /// Runs one turn of the loop. False once the probe has ended.
    fn step(&mut self) -> bool {
        let guesses = self.runner.guesses();
        let mut head = OwnHead { runner: &mut *self.runner, cost: &mut self.head_cost };
        let proposer = guesses.then_some(&mut head as &mut dyn Proposer);
        let step = self.scheduler.schedule_with(proposer);
        self.look(&step);
        let mut waits = false;
        if !step.rows.is_empty() {
            let (batch, rows) = forward_batch(&self.scheduler, &step);
            waits = rows.iter().any(RowSampling::awaits_mask);
            self.runner.launch(&batch, &rows).unwrap();
        }
        let more = !step.rows.is_empty() && self.scheduler.in_flight().len() < self.runner.depth();
        let going = more || self.collect();
        if waits {
            self.runner.sample(&known_rows(&self.scheduler)).unwrap();
        }
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
            self.seen.drafts += row.drafts;
        }
    }
}

fn alone(mut subject: Subject) -> ProbeOutput {
    let request = probe(&subject);
    let options = EngineOptions {
        num_blocks: BLOCKS * subject.cache.windows.len(),
        max_context: CONTEXT,
        block_size: BLOCK,
        cache: subject.cache,
        ..options()
    };
    let options = EngineOptions { max_batched_tokens: 512, ..options };
    let mut stage = Stage::new(&mut *subject.runner, options);
    stage.scheduler.add(PROBE, request);
    while stage.step() {}
    stage.output
}

fn among_neighbours(subject: &mut Subject, number: u32) -> (ProbeOutput, Seen) {
    let mut mix = Mix { number, draws: 0, vocabulary: subject.vocabulary };
    let (options, arrivals) = mix.scene(&subject.cache);
    let request = probe(subject);
    let mut stage = Stage::new(&mut *subject.runner, options);
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
            stage.scheduler.add(PROBE, request.clone());
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

/// Something that happened in at least one of some mixes.
type Event = (&'static str, fn(&Seen) -> bool);

/// These events happen to the probe of any model.
const COMMON: [Event; 5] = [
    ("preempted", |seen| seen.preempted > 0),
    ("chunked", |seen| seen.chunks >= 3),
    ("a prefix hit", |seen| seen.cached > 0),
    ("no prefix hit", |seen| seen.cached == 0),
    ("beside cancelled neighbours", |seen| seen.cancelled >= 3),
];
/// In many mixes these happen too, for models that find every block of a prompt again.
const OF_FULL_LAYERS: [Event; 4] = [
    ("preempted twice", |seen| seen.preempted >= 2),
    ("a full prefix hit", |seen| seen.cached == PROMPT / BLOCK as u32 * BLOCK as u32),
    ("a partial prefix hit", |seen| (1..PROMPT - BLOCK as u32).contains(&seen.cached)),
    ("in a batch of 64", |seen| seen.most_rows >= 64),
];
/// This happens to the probe of any model, if only one step is in flight at a time.
const DRAFTED: Event = ("drafted", |seen| seen.drafts > 0);

fn check(mixes: u32) {
    let expect = alone(Subject::tiny(1, 2));
    assert_eq!(expect.len(), OUTPUT as usize);
    for threads in [1, 3] {
        let again = alone(Subject::tiny(1, threads));
        assert_eq!(again, expect, "after a restart with {threads} threads");
    }
    for (depth, drafted) in [(1, &[DRAFTED][..]), (2, &[])] {
        let numbers = (depth as u32 - 1) * mixes..depth as u32 * mixes;
        let all = check_mixes(Subject::tiny(depth, 2), numbers, &expect);
        assert_happened("tiny", &all, &[&COMMON[..], &OF_FULL_LAYERS, drafted].concat());
    }
}

fn check_mixes(
    mut subject: Subject,
    mixes: impl Iterator<Item = u32>,
    expect: &ProbeOutput,
) -> Vec<Seen> {
    let mut all = Vec::new();
    for number in mixes {
        let (output, seen) = among_neighbours(&mut subject, number);
        assert!(output == *expect, "mix {number} changed the output of the probe: {seen:?}");
        all.push(seen);
    }
    all
}

fn assert_happened(name: &str, all: &[Seen], events: &[Event]) {
    for (what, happened) in events {
        assert!(all.iter().any(happened), "{name}: never {what} in {} mixes", all.len());
    }
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

/// Models of each kind of layers.
const FAMILIES: [&str; 10] = [
    "olmo3",
    "gpt-oss",
    "glm4-moe-groups",
    "gemma4-inputs",
    "gemma4-experts",
    "gemma4-uneven",
    "qwen3.5-moe",
    "granite-hybrid",
    "lfm2",
    "lfm2-recurrent",
];

/// What happened to each family's probe. Scenes with many rows take most of the time and are left
/// to the tiny model.
fn check_families(mixes: u32) -> Vec<Vec<Seen>> {
    let family = |name: &str| {
        let expect = alone(Subject::family(name, 1));
        assert_eq!(expect.len(), OUTPUT as usize);
        let at_depth = |depth: usize| {
            let subject = Subject::family(name, depth);
            let numbers = (depth as u32 - 1) * mixes..depth as u32 * mixes;
            check_mixes(subject, numbers.filter(|number| number % 3 != 1), &expect)
        };
        [1, 2].into_iter().flat_map(at_depth).collect()
    };
    FAMILIES.into_iter().map(family).collect()
}

/// So few mixes see what is frequent.
#[test]
fn neighbours_change_no_bit_of_any_family() {
    let [_, _, frequent @ ..] = COMMON;
    assert_happened("families", &check_families(4).concat(), &[&frequent[..], &[DRAFTED]].concat());
}

/// Guesses of the model's own head, which are right or wrong, change none either.
#[test]
fn neighbours_change_no_bit_of_a_model_that_guesses() {
    let expect = alone(Subject::with_head(false));
    let numbers = (0..24).filter(|number| number % 3 != 1);
    let all = check_mixes(Subject::with_head(true), numbers, &expect);
    assert_happened("guesses", &all, &[DRAFTED, COMMON[0], COMMON[4]]);
}

#[test]
#[ignore = "the same two hundred times longer"]
fn thousands_of_mixes_change_no_bit_of_any_family() {
    for (all, name) in check_families(600).into_iter().zip(FAMILIES) {
        assert_happened(name, &all, &[&COMMON[..], &[DRAFTED]].concat());
    }
}

//! The same input and seed give the same tokens, whatever else is in the batch. The toy model below
//! reads the past only through block tables and slots, so a block mix-up, a stale block or a wrong
//! position changes its tokens.

use super::ahead::Ahead;
use super::formats::Thirds;
use super::*;
use crate::grammar::TokenGrammar;
use crate::model_runner::ModelRunner;
use crate::runner::{RowResult, Runner};
use cresset_kernels::sampling::cpu::Sampler;
use cresset_kernels::sampling::params::RowSampling;
use cresset_models::cache_kinds::NO_STATE;
use cresset_models::testing::tiny_llama_gguf;
use cresset_models::{ForwardBatch, ModelOptions, ModelSource};
use std::collections::HashMap;

/// Starts an engine with given options and a number of steps in flight.
type Start<'a> = &'a dyn Fn(&EngineOptions, usize) -> EngineHandle;

const VOCABULARY: u64 = 40;

/// A "model" whose cache is one number per slot in each group of layers. The number that a token
/// stores depends on its whole past, as a deep layer's key does; its logits depend on every slot
/// that a group sees, as attention does.
struct SlotRunner {
    block_size: usize,
    kinds: CacheKinds,
    slots: HashMap<u32, u64>,
    /// What recurrent layers carry on, by slot.
    states: HashMap<u32, u64>,
    sampler: Sampler,
    results: Vec<RowResult>,
}

impl SlotRunner {
    fn start(options: &EngineOptions, depth: usize) -> EngineHandle {
        let (block_size, slots, states) = (options.block_size, HashMap::new(), HashMap::new());
        let kinds = options.cache.clone();
        let (sampler, results) = (Sampler::default(), Vec::new());
        let runner = Self { block_size, kinds, slots, states, sampler, results };
        EngineHandle::start(Ahead::wrap(depth, runner), options.clone())
    }

    fn read(&self, table: &[u32], position: usize) -> u64 {
        let block = table[position / self.block_size] as usize;
        self.slots[&((block * self.block_size + position % self.block_size) as u32)]
    }

    /// The state that a part of a sequence goes on from, which no other sequence of the step
    /// writes.
    fn state(&self, batch: &ForwardBatch, part: usize, start: u32) -> u64 {
        let (read, writes) = (batch.state_reads[part], &batch.state_writes);
        let goes_on = !batch.cu_seqlens_q.contains(&start);
        assert!(!goes_on || read == writes[part - 1]);
        let before = if goes_on { part - 1 } else { part };
        for (other, slot) in writes.iter().enumerate().filter(|(i, _)| *i != part) {
            assert!(*slot != writes[part] && (*slot != read || other == before));
        }
        let begins = batch.positions[start as usize] == 0;
        assert_eq!(begins, read == NO_STATE);
        if begins { 0 } else { self.states[&read] }
    }

    /// Stores one token and returns its logits. `state` is that of its sequence.
    fn token(
        &mut self,
        batch: &ForwardBatch,
        index: usize,
        sequence: usize,
        state: &mut u64,
    ) -> Vec<f32> {
        let position = batch.positions[index] as usize;
        let (n, sequences) = (batch.input_ids.len(), batch.seq_lens.len());
        let mut seen = mix(u64::from(batch.input_ids[index]), position as u64);
        if self.kinds.states > 0 {
            *state = mix(*state, seen);
            seen = mix(seen, *state);
        }
        for (group, window) in self.kinds.windows.iter().enumerate() {
            let table = &batch.block_tables[group * sequences + sequence];
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
            let before = (first..position).fold(seen, |seen, p| mix(seen, self.read(table, p)));
            seen = mix(before, group as u64);
            self.slots.insert(batch.slot_mapping[group * n + index], seen);
        }
        let logit = |id| (mix(seen, id) % 1000) as f32 / 300.0;
        (0..VOCABULARY).map(logit).collect()
    }
}

impl Runner for SlotRunner {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        let mut rows = rows.iter();
        let parts = [&batch.part_starts, &batch.cu_seqlens_q];
        let parts = parts.into_iter().find(|starts| !starts.is_empty()).unwrap();
        for sequence in 0..batch.seq_lens.len() {
            let mut state = 0;
            let [from, to] = [0, 1].map(|edge| batch.cu_seqlens_q[sequence + edge]);
            assert_eq!(batch.positions[to as usize - 1] + 1, batch.seq_lens[sequence]);
            for index in from..to {
                if let Ok(part) = parts.binary_search(&index)
                    && self.kinds.states > 0
                {
                    state = self.state(batch, part, index);
                }
                let logits = self.token(batch, index as usize, sequence, &mut state);
                if batch.logits_indices.contains(&index) {
                    let row = rows.next().expect("a row for each index");
                    let sampled = self.sampler.sample(&logits, row);
                    self.results.push(sampled.map_err(EngineError::from));
                }
                if let Ok(next) = parts.binary_search(&(index + 1))
                    && let Some(slot) = batch.state_writes.get(next - 1)
                {
                    self.states.insert(*slot, state);
                }
            }
        }
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        Ok(std::mem::take(&mut self.results))
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let mixed = (a ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_add(0xD1B5_4A32_D192_ED03);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ (mixed >> 32)
}

fn probe() -> GenerateRequest {
    GenerateRequest {
        sampling: SamplingParams {
            seed: 42,
            temperature: 0.9,
            top_p: 0.95,
            presence_penalty: 0.3,
            ..SamplingParams::default()
        },
        ..request(0..37, 40)
    }
}

/// Requests of several accounts; many begin like the probe and then differ, and some keep to a
/// grammar.
fn requests(count: u32) -> impl Iterator<Item = GenerateRequest> {
    let own = |i: u32| (i..i + 9).map(|token| token % VOCABULARY as u32);
    (0..count).map(move |i| GenerateRequest {
        account: AccountId(Uuid::from_u128(u128::from(i % 3))),
        sampling: SamplingParams { seed: u64::from(i), ..SamplingParams::default() },
        grammar: (i % 4 == 1).then(|| Arc::new(Thirds) as Arc<dyn TokenGrammar>),
        ..request((0..i % 37).chain(own(i)), 1 + i % 60)
    })
}

/// The tokens of all sequences, the probe first, and the engine's statistics afterwards.
fn generate(
    start: Start,
    depth: usize,
    options: &EngineOptions,
    others: u32,
) -> (Vec<Vec<u32>>, EngineStats) {
    let engine = start(&EngineOptions { max_waiting: 100, ..options.clone() }, depth);
    let submit = |request| engine.submit(request).unwrap().1;
    let before: Vec<_> = requests(others).map(submit).collect();
    let probe = submit(probe());
    let after: Vec<_> = requests(others / 2).map(submit).collect();
    let tokens = |events| {
        let (tokens, finished) = collect(events);
        assert_eq!(finished.cause, StopCause::Length);
        tokens
    };
    let tokens = std::iter::once(probe).chain(before).chain(after).map(tokens).collect();
    wait_for(&engine, "idle", |stats| stats.running + stats.blocks_used == 0);
    (tokens, engine.stats())
}

/// Runs the probe alone, and among 96 requests under options that chunk, preempt and share; with
/// one step in flight and with two.
fn check_every_mix(cache: &CacheKinds, start: Start) {
    let tight = |blocks: usize| blocks * cache.windows.len();
    let options = || EngineOptions { cache: cache.clone(), ..options() };
    let roomy = EngineOptions { num_blocks: 4_096, max_rows: 64, ..options() };
    let (alone, _) = generate(start, 1, &roomy, 0);
    let (expect, stats) = generate(start, 1, &roomy, 64);
    assert_eq!((&alone[0], stats.preemptions), (&expect[0], 0));
    assert!(alone[0].len() == 40 && stats.prefix_hit_tokens > 0);
    let check = |what: &str, options: EngineOptions, happened: fn(&EngineStats) -> bool| {
        for depth in [1, 2] {
            let (tokens, stats) = generate(start, depth, &options, 64);
            assert!(tokens == expect, "{what} changed a sequence at depth {depth}");
            assert!(happened(&stats), "{what} did not happen at depth {depth}: {stats:?}");
        }
    };
    check("neighbours", roomy, |stats| stats.preemptions == 0);
    check("preemption", EngineOptions { num_blocks: tight(32), ..options() }, |stats| {
        stats.preemptions > 0
    });
    let chunked = EngineOptions { max_batched_tokens: 8, ..options() };
    let spacious = EngineOptions { num_blocks: tight(256), ..chunked.clone() };
    check("chunking", spacious, |stats| stats.steps > 300);
    check(
        "chunking with preemption",
        EngineOptions { num_blocks: tight(32), ..chunked },
        |stats| stats.preemptions > 0,
    );
    let sevens = EngineOptions { block_size: 7, num_blocks: tight(20), ..options() };
    check("another block size", sevens, |stats| stats.preemptions > 0);
}

fn of_windows(windows: &[Option<usize>]) -> CacheKinds {
    CacheKinds { windows: windows.to_vec(), ..CacheKinds::default() }
}

/// One group of layers with attention, and recurrent ones.
fn with_states(states: usize) -> CacheKinds {
    CacheKinds { states, first_kept: 8, ..CacheKinds::default() }
}

#[test]
fn neighbours_change_no_token() {
    for windows in [&[None][..], &[None, Some(12)], &[Some(60)], &[Some(30), None, Some(30)]] {
        check_every_mix(&of_windows(windows), &SlotRunner::start);
    }
    for states in [130, 400] {
        check_every_mix(&with_states(states), &SlotRunner::start);
    }
}

/// So few states that hardly any is kept, and accounts take rows from one another.
#[test]
fn few_states_change_no_token() {
    let roomy = EngineOptions { cache: with_states(400), num_blocks: 4_096, ..options() };
    let (expect, _) = generate(&SlotRunner::start, 1, &roomy, 64);
    for (states, depth) in [(2, 1), (5, 2), (9, 1), (9, 2)] {
        let options = EngineOptions { cache: with_states(states), ..roomy.clone() };
        let (tokens, _) = generate(&SlotRunner::start, depth, &options, 64);
        assert!(tokens == expect, "{states} states at depth {depth}");
    }
}

#[test]
fn neighbours_change_no_token_of_a_real_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_llama_gguf(&path, 3).unwrap();
    check_model(&ModelSource::gguf(path), &CacheKinds::default(), 2 * 2 * 16, 0);
}

/// The first model has two layers that see everything and one with a window, the other two of each,
/// with sinks and experts.
#[test]
fn neighbours_change_no_token_of_a_model_with_a_window() {
    let gemma = ("gemma3-odd", &[None, None, Some(8)][..], 2 * 16);
    let gpt_oss = ("gpt-oss", &[None, Some(8)][..], 2 * 2 * 16);
    for (name, windows, width) in [gemma, gpt_oss] {
        let folder = tempfile::tempdir().unwrap();
        let source = golden_model(name, folder.path(), 128);
        check_model(&source, &of_windows(windows), width, 0);
    }
}

/// Each token has one vector of 40 values in each of three layers, in place of K and V.
#[test]
fn neighbours_change_no_token_of_a_model_with_latent_attention() {
    let folder = tempfile::tempdir().unwrap();
    let source = golden_model("deepseek-v3", folder.path(), 128);
    check_model(&source, &CacheKinds::default(), 3 * 40 / 2, 0);
}

/// Models most of whose layers are recurrent.
#[test]
fn neighbours_change_no_token_of_a_model_with_states() {
    let lfm2 = ("lfm2", 2 * 16, 3 * 2 * 64 * 4);
    let qwen = ("qwen3.5", 2 * 32, 3 * (3 * 128 + 4 * 16 * 16) * 4);
    for (name, width, state_bytes) in [lfm2, qwen] {
        let folder = tempfile::tempdir().unwrap();
        let source = golden_model(name, folder.path(), 128);
        check_model(&source, &with_states(150), width, state_bytes);
    }
}

/// `width` is the number of values that a token's K has in one block, or half of what it has there.
fn check_model(source: &ModelSource, cache: &CacheKinds, width: usize, state_bytes: usize) {
    check_every_mix(cache, &|options, depth| {
        let options = &EngineOptions { cache: cache.clone(), ..options.clone() };
        let loaded = ModelRunner::load(source, &runner_options(options, width, state_bytes));
        let (runner, info) = loaded.unwrap();
        assert_eq!((info.num_blocks, &info.cache), (options.num_blocks, &options.cache));
        EngineHandle::start(Ahead::wrap(depth, runner), options.clone())
    });
}

/// Options with memory for exactly `num_blocks` blocks of f32 values, and for the states.
fn runner_options(options: &EngineOptions, width: usize, state_bytes: usize) -> ModelOptions {
    let states = options.cache.states * state_bytes;
    let kv_bytes = options.num_blocks * options.block_size * width * 2 * 4 + states;
    ModelOptions {
        threads: 2,
        dequantise: false,
        kv_bytes,
        // Half a state more, against rounding.
        state_share: (states + state_bytes / 2) as f64 / kv_bytes as f64,
        state_tokens: options.cache.first_kept,
        block_size: options.block_size,
        max_batched_tokens: options.max_batched_tokens,
        max_context: Some(options.max_context),
        ..ModelOptions::default()
    }
}

#[test]
fn a_prefix_hit_changes_nothing() {
    let engine = SlotRunner::start(&options(), 2);
    let say = || collect(engine.submit(probe()).unwrap().1);
    let (cold, first) = say();
    let (warm, second) = say();
    assert_eq!(warm, cold);
    assert_eq!((first.cached_tokens, second.cached_tokens), (0, 36));
}

#[test]
fn another_seed_gives_other_tokens() {
    let engine = SlotRunner::start(&options(), 1);
    let mut other = probe();
    other.sampling.seed = 43;
    let [one, two] = [probe(), other].map(|request| collect(engine.submit(request).unwrap().1).0);
    assert_ne!(one, two);
}

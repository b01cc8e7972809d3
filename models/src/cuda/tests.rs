//! Models on a device against those on the CPU and against themselves, with other sequences in the
//! step.

use super::cache::block_bytes;
use super::*;
use crate::goldens::{goldens, logits};
use crate::testing::{TinyLlama, vocab_size};
use crate::tests::goldens::Case;
use crate::tests::{Span, assert_close, batch, rows, tokens};
use cresset_kernels::gpu::{Buffer, Emulator, device_or_emulator};
use cresset_kernels::sampling::{Sampled, Special};

mod formats;
mod fp8_cache;
mod mixed;
mod quantised;
mod ranks;
mod windows;

const BLOCK: usize = 16;

fn options(kind: Kind) -> ModelOptions {
    let gpu = device_or_emulator(24 << 20, 4);
    ModelOptions {
        // On a large device, the share is limited so that some numbers of blocks lie outside the
        // cache.
        gpu_memory_share: (f64::from(1 << 30) / gpu.properties().memory_bytes as f64).min(0.5),
        gpu: Some(gpu),
        further_ranks: Vec::new(),
        threads: 1,
        dequantise: kind == Kind::F32,
        byte_activations: false,
        deterministic: false,
        kv_bytes: 0,
        gpu_reserve_mib: 0,
        gpu_kv_mib: 0,
        block_size: BLOCK,
        max_batched_tokens: 64,
        max_rows: 8,
        max_context: Some(256),
        gpu_graph_rows: 8,
        ..ModelOptions::default()
    }
}

fn load_from(source: &ModelSource, options: &ModelOptions) -> Result<CudaModel> {
    CudaModel::load(source, options.gpu.as_ref().unwrap(), options)
}

fn load(tiny: &TinyLlama, options: &ModelOptions) -> Result<CudaModel> {
    let folder = tempfile::tempdir().unwrap();
    tiny.write_safetensors(folder.path()).unwrap();
    load_from(&ModelSource::hf_folder(folder.path().to_owned()), options)
}

impl CudaModel {
    /// Runs one step without sampling. Returns `[logits_indices, vocab_size]`.
    fn logits(&mut self, batch: &ForwardBatch) -> Vec<Vec<f32>> {
        let shape = self.shape(batch);
        self.stage(batch, &[], shape).unwrap();
        self.compute_logits(&shape).unwrap();
        let all: Vec<f32> = self.workspace.logits.to_vec().unwrap();
        let rows = all.chunks_exact(self.config().vocab_size).take(batch.logits_indices.len());
        rows.map(<[f32]>::to_vec).collect()
    }
}

/// Returns the logits of tokens that follow `cached` others, in blocks that are not adjacent.
fn alone(model: &mut CudaModel, cached: usize, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let blocks: Vec<u32> = (1..16).map(|i| i * 2 + 1).collect();
    let mut out = Vec::new();
    for (i, part) in tokens.chunks(chunk).enumerate() {
        let span = Span { tokens: part, cached: cached + i * chunk, blocks: &blocks };
        let step = batch(&[span], BLOCK, false).spread(model.cache_kinds(), BLOCK);
        out.extend(model.logits(&step));
    }
    out
}

/// The norm of the difference over the norm of the expected values, over all rows.
fn error(got: &[Vec<f32>], want: &[Vec<f32>]) -> f32 {
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
    let pairs = || got.iter().flatten().zip(want.iter().flatten());
    norm(&mut pairs().map(|(g, w)| g - w)) / norm(&mut pairs().map(|(_, w)| *w))
}

/// The logits of every token are asked for, and LongRoPE chooses its factors by the longest
/// context.
fn options_of(case: &Case, kind: Kind) -> ModelOptions {
    let len = case.tokens.len();
    ModelOptions {
        max_rows: len,
        max_batched_tokens: len,
        max_context: Some(len),
        gpu_graph_rows: 0,
        ..options(kind)
    }
}

/// Computes a prompt in two chunks, then token by token.
fn in_parts(model: &mut CudaModel, tokens: &[u32]) -> Vec<Vec<f32>> {
    let (prompt, rest) = tokens.split_at(tokens.len() - 3);
    let mut logits = alone(model, 0, prompt, tokens.len() / 2);
    logits.extend(alone(model, prompt.len(), rest, 1));
    logits
}

/// Compares the logits that `run` computes with weights and activations of a kind.
fn check_family(case: &Case, want: &[Vec<f32>], run: impl Fn(Kind) -> Result<Vec<Vec<f32>>>) {
    let name = &case.name;
    assert_close(
        &run(Kind::F32).unwrap_or_else(|error: Error| panic!("{name}: {error}")),
        want,
        name,
    );
    let rounded = run(Kind::Bf16).unwrap_or_else(|error: Error| panic!("{name}: {error}"));
    // Rounding may give a token another expert, of almost the same score.
    let chosen = |key: &str| case.config[key].is_u64();
    let experts = chosen("num_experts_per_tok") || chosen("top_k_experts");
    let tolerance = if experts { 0.2 } else { 0.05 };
    let error = error(&rounded, want);
    assert!(error < tolerance, "{name} in bf16: {error}");
}

#[test]
fn every_family_equals_transformers() {
    let logits = logits();
    for case in &goldens().cases {
        check_family(case, &rows(&logits[&case.name]), |kind| {
            let load = |source: &ModelSource| load_from(source, &options_of(case, kind));
            case.in_folder(&case.config, load).map(|mut model| in_parts(&mut model, &case.tokens))
        });
    }
}

/// Sequences that decode greedily, some in the middle of others' prompts.
struct Sequences {
    model: CudaModel,
    tokens: Vec<Vec<u32>>,
    computed: Vec<usize>,
    /// The special tokens of each row.
    specials: Vec<Special>,
}

impl Sequences {
    fn new(model: CudaModel, prompts: &[usize]) -> Self {
        let tokens: Vec<_> = prompts.iter().enumerate().map(|(i, len)| tokens(*len, i)).collect();
        Self { model, computed: vec![0; tokens.len()], tokens, specials: Vec::new() }
    }

    /// The next step of the sequences `of`, with at most `chunk` tokens of each.
    fn batch(&self, of: &[usize], chunk: usize) -> (ForwardBatch, Vec<usize>) {
        let blocks: Vec<Vec<u32>> =
            of.iter().map(|i| (0..10).map(|j| (j * 13 + i) as u32).collect()).collect();
        let span = |(i, blocks): (&usize, _)| {
            let from = self.computed[*i];
            let to = self.tokens[*i].len().min(from + chunk);
            Span { tokens: &self.tokens[*i][from..to], cached: from, blocks }
        };
        let spans: Vec<_> = of.iter().zip(&blocks).map(|(i, blocks)| span((i, blocks))).collect();
        let mut step = batch(&spans, BLOCK, true);
        let ready = |(_, i): &(usize, &usize)| self.computed[**i] + chunk >= self.tokens[**i].len();
        let (at, sampled): (Vec<usize>, Vec<usize>) = of.iter().enumerate().filter(ready).unzip();
        step.logits_indices = at.iter().map(|at| step.logits_indices[*at]).collect();
        (step, sampled)
    }

    fn step(&mut self, of: &[usize], chunk: usize) {
        let (step, sampled) = self.batch(of, chunk);
        let row = DeviceRow { specials: self.specials.clone(), ..DeviceRow::greedy() };
        self.model.start(&step, &vec![row; sampled.len()]).unwrap();
        let outcomes = self.model.collect().unwrap();
        for i in of {
            self.computed[*i] = self.tokens[*i].len().min(self.computed[*i] + chunk);
        }
        for (i, outcome) in sampled.into_iter().zip(outcomes) {
            let Ok(Sampled { token, .. }) = outcome else { panic!("{outcome:?}") };
            self.tokens[i].push(token);
        }
    }
}

/// Computes prompts in chunks, then all sequences together, then in turns.
fn generated_tokens(model: CudaModel) -> Vec<Vec<u32>> {
    let mut group = Sequences::new(model, &[37, 1, 18, 5, 29]);
    group.step(&[0, 1], 20);
    for _ in 0..4 {
        group.step(&[0, 1, 2, 3], 9);
    }
    for turn in 0..9 {
        let all = [0, 1, 2, 3, 4];
        group.step(&all[turn % 3..], 12);
    }
    group.tokens
}

#[test]
fn recorded_steps_give_the_same_tokens_as_others() {
    let tiny = TinyLlama { seed: 11, ..TinyLlama::default() };
    for (kind, deterministic) in [(Kind::F32, false), (Kind::Bf16, true)] {
        let with = |graph_rows| {
            load(
                &tiny,
                &ModelOptions { deterministic, gpu_graph_rows: graph_rows, ..options(kind) },
            )
            .unwrap()
        };
        let expect = generated_tokens(with(0));
        assert_eq!(generated_tokens(with(8)), expect, "{kind:?}");
        assert!(expect.iter().all(|tokens| tokens.len() > 8));
    }
}

/// Each token is fed back on the device before the host has seen it; the tokens are the same.
#[test]
fn steps_run_ahead_of_the_host() {
    let tiny = TinyLlama { seed: 12, ..TinyLlama::default() };
    for graph_rows in [0, 8] {
        let model = |rows| {
            load(&tiny, &ModelOptions { gpu_graph_rows: rows, ..options(Kind::F32) }).unwrap()
        };
        let mut slow = Sequences::new(model(0), &[9, 14, 3]);
        (0..8).for_each(|_| slow.step(&[0, 1, 2], 64));
        let mut fast = Sequences::new(model(graph_rows), &[9, 14, 3]);
        let mut launched = Vec::new();
        for step in 0..8 {
            let (mut batch, _) = fast.batch(&[0, 1, 2], 64);
            if step > 0 {
                batch.feedback = (0..3).map(Some).collect();
            }
            fast.model.start(&batch, &vec![DeviceRow::greedy(); 3]).unwrap();
            launched.push(batch.seq_lens.clone());
            if step > 0 {
                fast.take(&launched);
            }
            // The host does not have the token yet: a zero stands for it.
            for i in 0..3 {
                fast.computed[i] = fast.tokens[i].len();
                fast.tokens[i].push(0);
            }
        }
        fast.take(&launched);
        assert_eq!(fast.tokens, slow.tokens, "recorded for {graph_rows} rows");
    }
}

impl Sequences {
    /// Puts the results of the oldest step in flight in place of the zeros.
    fn take(&mut self, launched: &[Vec<u32>]) {
        let step = launched.len() - self.model.in_flight.len();
        for (i, outcome) in self.model.collect().unwrap().into_iter().enumerate() {
            let Ok(Sampled { token, .. }) = outcome else { panic!("{outcome:?}") };
            self.tokens[i][launched[step][i] as usize] = token;
        }
    }
}

/// Rows have more special tokens and longer tables than the inputs had room for: the inputs grow,
/// and steps are recorded again.
#[test]
fn inputs_grow() {
    let tiny = TinyLlama { seed: 13, ..TinyLlama::default() };
    let tokens_with = |specials: &[Special]| {
        let mut group = Sequences::new(
            load(&tiny, &ModelOptions { max_rows: 2, ..options(Kind::F32) }).unwrap(),
            &[6, 6],
        );
        let before = group.model.inputs.words();
        for step in 0..6 {
            group.specials = if step < 3 { Vec::new() } else { specials.to_vec() };
            group.step(&[0, 1], 64);
        }
        assert_eq!(group.model.inputs.words() == before, specials.is_empty());
        group.tokens
    };
    let many: Vec<_> = (0..vocab_size() as u32)
        .cycle()
        .take(9000)
        .map(|token| Special { token, bias: 0.0 })
        .collect();
    assert_eq!(tokens_with(&many), tokens_with(&[]));
}

#[test]
fn contradictory_steps_are_refused_and_do_no_harm() {
    let mut group =
        Sequences::new(load(&TinyLlama::default(), &options(Kind::F32)).unwrap(), &[20, 20]);
    group.step(&[0, 1], 64);
    let (good, _) = group.batch(&[0, 1], 64);
    let row = || vec![DeviceRow::greedy(); 2];
    let mut check = |message: &str, rows: &[DeviceRow], change: fn(&mut ForwardBatch)| {
        let mut bad = good.clone();
        change(&mut bad);
        let error = group.model.start(&bad, rows).unwrap_err().to_string();
        assert!(error.contains(message), "{error:?} does not say {message:?}");
    };
    check("result 2 of a step that had 2", &row(), |b| {
        (b.feedback, b.input_ids[1]) = (vec![None, Some(2)], 0);
    });
    check("1 rows are sampled where 2", &row()[..1], |_| ());
    check("outside the cache", &row(), |b| b.block_tables[0][3] = 1_000_000);
    check("needs position", &row(), |b| b.slot_mapping[0] = 3);
    check("one state of each", &row(), |b| b.part_starts = b.cu_seqlens_q.clone());
    for _ in 0..DEPTH {
        group.model.start(&good, &row()).unwrap();
    }
    let error = group.model.start(&good, &row()).unwrap_err().to_string();
    assert!(error.contains("in flight"), "{error}");
    group.model.recover().unwrap();
    assert!(group.model.collect().is_err());
    group.step(&[0, 1], 64);
}

/// A kernel that fails makes the device unusable, and the error says so. The test uses the
/// emulator, because a failed real device would fail the other tests too.
#[test]
fn a_fault_of_the_device_is_final() {
    let options = ModelOptions {
        gpu: Some(Emulator::with(24 << 20, 4)),
        gpu_memory_share: 0.5,
        ..options(Kind::F32)
    };
    let mut group = Sequences::new(load(&TinyLlama::default(), &options).unwrap(), &[3]);
    group.step(&[0], 64);
    let (step, _) = group.batch(&[0], 64);
    // The slot lies outside the cache; `launch` would have refused it.
    let shape = group.model.shape(&step);
    let bad = ForwardBatch { slot_mapping: vec![u32::MAX - 7], ..step };
    group.model.stage(&bad, &[], shape).unwrap();
    group.model.step(&shape).unwrap();
    assert!(group.model.recover().is_err());
}

#[test]
fn too_little_memory_is_told_at_the_start() {
    let load = |bytes, gpu_memory_share| {
        let options = ModelOptions {
            gpu: Some(Emulator::with(bytes, 4)),
            gpu_memory_share,
            ..options(Kind::F32)
        };
        load(&TinyLlama::default(), &options).err().unwrap().to_string()
    };
    let error = load(24 << 20, 0.01);
    assert!(error.contains("no room for the KV cache"), "{error}");
    let error = load(1 << 18, 0.9);
    assert!(error.starts_with("allocate: the device failed: \"out of memory"), "{error}");
}

/// A card holds models with caches of given sizes, beside another program, and then one that takes
/// the rest but for the reserve.
#[test]
fn models_share_a_card_by_their_sizes() {
    let gpu = Emulator::of(Emulator::card("rtx-3060", 64 << 20).unwrap());
    let free = || gpu.memory().unwrap().0;
    let load = |kv_mib, reserve_mib| {
        let options = ModelOptions {
            gpu: Some(gpu.clone()),
            gpu_memory_share: 1.0,
            gpu_kv_mib: kv_mib,
            gpu_reserve_mib: reserve_mib,
            ..options(Kind::Bf16)
        };
        load(&TinyLlama::default(), &options).unwrap()
    };
    let all = free();
    let first = load(1, 0);
    assert_eq!(first.memory_bytes(), all - free());
    let block = block_bytes(first.config(), BLOCK);
    assert_eq!(first.num_blocks() + 1, (1 << 20) / block);
    let second = load(1, 0);
    assert_eq!(second.memory_bytes(), first.memory_bytes());
    let _other = Buffer::new(&gpu, Kind::U8, 5 << 20).unwrap();
    let reserve = 7 << 20;
    let rest = load(0, 7);
    assert!(rest.num_blocks() > first.num_blocks());
    assert!((reserve..reserve + 3 * block).contains(&free()), "{} of {reserve}", free());
}

//! Layers with a window keep no more than it shows: the blocks behind it are given back, and what
//! lies there is never read.

use super::*;
use crate::KvCache;
use crate::arch;
use crate::cache_kinds::{NO_BLOCK, first_kept};
use crate::cpu::CpuModel;
use crate::cuda::cache::context_bytes;
use cresset_kernels::sampling::SamplingParams;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

/// Sequences in a few blocks, which are given back as the engine does it and handed out again.
struct FewBlocks<M> {
    model: M,
    free: VecDeque<u32>,
    /// Overwrites what nobody may read any more.
    poison: fn(&M, u32),
    /// Blocks given back so far.
    given_back: usize,
    sequences: Vec<KeptSequence>,
}

struct KeptSequence {
    tokens: Vec<u32>,
    prompt: usize,
    computed: usize,
    /// Its blocks in each group of layers.
    groups: Vec<Vec<u32>>,
}

impl<M: Model> FewBlocks<M> {
    fn new(model: M, blocks: u32, prompts: &[Vec<u32>], poison: fn(&M, u32)) -> Self {
        assert!(model.num_blocks() >= blocks as usize);
        let sequence = |tokens: &Vec<u32>| KeptSequence {
            tokens: tokens.clone(),
            prompt: tokens.len(),
            computed: 0,
            groups: vec![Vec::new(); model.cache_kinds().windows.len()],
        };
        let sequences = prompts.iter().map(sequence).collect();
        let few = Self { free: (0..blocks).collect(), given_back: 0, model, poison, sequences };
        few.free.iter().for_each(|block| poison(&few.model, *block));
        few
    }

    /// A step of the sequences `of`, with at most `chunk` of the next tokens of each.
    fn batch(&mut self, of: &[usize], chunk: usize) -> ForwardBatch {
        for i in of {
            let KeptSequence { tokens, computed, groups, .. } = &mut self.sequences[*i];
            let len = tokens.len().min(*computed + chunk).div_ceil(BLOCK);
            for group in groups {
                let more = len.saturating_sub(group.len());
                group.extend(self.free.drain(..more));
            }
        }
        let all = || of.iter().map(|i| &self.sequences[*i]);
        let next = |s: &KeptSequence| s.computed..s.tokens.len().min(s.computed + chunk);
        let of_group = |group: usize| {
            let span = move |s| {
                let KeptSequence { tokens, computed, groups, .. }: &KeptSequence = s;
                Span { tokens: &tokens[next(s)], cached: *computed, blocks: &groups[group] }
            };
            batch(&all().map(span).collect::<Vec<_>>(), BLOCK, true)
        };
        let mut step = of_group(0);
        for group in 1..self.model.cache_kinds().windows.len() {
            let more = of_group(group);
            step.slot_mapping.extend(more.slot_mapping);
            step.block_tables.extend(more.block_tables);
        }
        step
    }

    /// Counts the next tokens of a sequence as computed, and gives back what no later one sees.
    fn commit(&mut self, i: usize, chunk: usize) {
        let KeptSequence { tokens, computed, groups, .. } = &mut self.sequences[i];
        *computed = tokens.len().min(*computed + chunk);
        for (group, window) in groups.iter_mut().zip(&self.model.cache_kinds().windows) {
            for block in &mut group[..first_kept(*window, *computed, BLOCK)] {
                let block = std::mem::replace(block, NO_BLOCK);
                if block != NO_BLOCK {
                    (self.poison)(&self.model, block);
                    self.free.push_back(block);
                    self.given_back += 1;
                }
            }
        }
    }

    /// Computes a step; sequences whose tokens are all computed get the next one.
    fn step(&mut self, of: &[usize], chunk: usize) {
        let mut step = self.batch(of, chunk);
        let ends = |i: &usize| {
            let KeptSequence { tokens, computed, .. } = &self.sequences[*i];
            computed + chunk >= tokens.len()
        };
        let (at, sampled): (Vec<usize>, Vec<usize>) =
            of.iter().enumerate().filter(|(_, i)| ends(i)).unzip();
        step.logits_indices = at.iter().map(|at| step.logits_indices[*at]).collect();
        let rows: Vec<_> = sampled.iter().map(|i| penalised(&self.sequences[*i])).collect();
        self.model.launch(&step, &rows).unwrap();
        let results = self.model.collect().unwrap();
        for i in of {
            self.commit(*i, chunk);
        }
        for (i, result) in sampled.into_iter().zip(results) {
            self.sequences[i].tokens.push(result.unwrap().token);
        }
    }
}

/// The most likely token, where tokens of the whole sequence are less so.
fn penalised(sequence: &KeptSequence) -> RowSampling {
    let params = SamplingParams {
        temperature: 0.0,
        repetition_penalty: 1.2,
        frequency_penalty: 0.3,
        ..SamplingParams::default()
    };
    RowSampling {
        params: Arc::new(params),
        tokens: Arc::new(sequence.tokens.clone()),
        pending: None,
        prompt_len: sequence.prompt,
        banned: Arc::default(),
        grammar: None,
    }
}

/// Fills a block's K and V with NaN, in all of its places.
fn poison(model: &CudaModel, block: u32) {
    let KvCache { k, v, num_blocks, layout, .. } = &model.cache.kv;
    let config = model.config();
    let block = block as usize;
    for (buffer, width) in k.iter().chain(v).zip(layout.widths.iter().cycle()) {
        let scales = if config.kv_kind == E4M3 { 2 * width / (config.head_dim + 2) } else { 0 };
        let codes = width - scales;
        for (first, len) in [(0, codes), (num_blocks * BLOCK * codes, scales)] {
            let from = first + block * BLOCK * len;
            let own = buffer.view().slice(from..from + BLOCK * len);
            model.gpu().fill(own, 0xff).unwrap();
        }
    }
}

fn windowed_families() -> impl Iterator<Item = Case> {
    let windowed = |case: &Case| {
        let spec = arch::from_hf(Path::new("config.json"), case.config.to_string().as_bytes());
        spec.unwrap().config.sliding.is_some_and(|sliding| sliding.window < case.tokens.len())
    };
    goldens().cases.into_iter().filter(windowed)
}

#[test]
fn windowed_families_equal_transformers_without_what_was_given_back() {
    let (logits, mut tried) = (logits(), 0);
    for case in windowed_families() {
        check_family(&case, &rows(&logits[&case.name]), |kind| {
            let load = |source: &ModelSource| load_from(source, &options_of(&case, kind));
            let model = case.in_folder(&case.config, load)?;
            let blocks = 3 * model.cache_kinds().windows.len() as u32;
            let prompt = std::slice::from_ref(&case.tokens);
            let mut few = FewBlocks::new(model, blocks, prompt, poison);
            let mut found = Vec::new();
            while few.sequences[0].computed < case.tokens.len() {
                let chunk = if few.sequences[0].computed < 20 { 10 } else { 1 };
                let mut step = few.batch(&[0], chunk);
                step.logits_indices = (0..step.input_ids.len() as u32).collect();
                found.extend(few.model.logits(&step));
                few.commit(0, chunk);
            }
            assert!(few.given_back > 0, "{}", case.name);
            Ok(found)
        });
        tried += 1;
    }
    assert!(tried > 8, "{tried} families");
}

const WINDOW: usize = 24;

/// A model with a window in the layers that `windowed` names. Heads have 64 values, for which there
/// are kernels in eight bits.
fn source(folder: &Path, windowed: [bool; 4]) -> ModelSource {
    let tiny = TinyLlama {
        seed: 31,
        layers: windowed.len(),
        hidden: 128,
        heads: 2,
        kv_heads: 1,
        ..TinyLlama::default()
    };
    tiny.write_safetensors(folder).unwrap();
    let mut config = tiny.hf_config();
    config["model_type"] = "ministral".into();
    config["sliding_window"] = WINDOW.into();
    let name = |slides| if slides { "sliding_attention" } else { "full_attention" };
    config["layer_types"] = windowed.map(name).to_vec().into();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    ModelSource::hf_folder(folder.to_owned())
}

/// Layers of both kinds, whose rarer kind has one layer; and none without a window.
const LAYERS: [[bool; 4]; 2] = [[true, true, false, true], [true; 4]];

fn prompts() -> [Vec<u32>; 5] {
    [tokens(90, 0), tokens(3, 1), tokens(41, 2), tokens(130, 3), tokens(1, 4)]
}

/// Long prompts in chunks beside sequences that decode, in turns.
fn mixed<M: Model>(mut few: FewBlocks<M>) -> Vec<Vec<u32>> {
    few.step(&[0, 1], 20);
    for _ in 0..4 {
        few.step(&[0, 1, 2, 3], 15);
    }
    for turn in 0..40 {
        few.step(&[0, 1, 2, 3, 4][turn % 3..], 12);
    }
    assert!(few.given_back > 20, "{}", few.given_back);
    few.sequences.into_iter().map(|sequence| sequence.tokens).collect()
}

/// Each sequence by itself, as many tokens as `mixed` computes.
fn each_alone<M: Model>(model: M, lens: &[usize], poison: fn(&M, u32)) -> Vec<Vec<u32>> {
    let all = prompts();
    let mut few = FewBlocks::new(model, 200, &all, poison);
    for (i, len) in lens.iter().enumerate() {
        while few.sequences[i].tokens.len() < *len {
            few.step(&[i], 64);
        }
    }
    few.sequences.into_iter().map(|sequence| sequence.tokens).collect()
}

/// The history that penalties count goes beyond every window.
#[test]
fn tokens_beyond_windows_are_those_of_the_cpu() {
    for layers in LAYERS {
        let folder = tempfile::tempdir().unwrap();
        let source = source(folder.path(), layers);
        let mut expect = None;
        for graph_rows in [0, 8] {
            let options = ModelOptions { gpu_graph_rows: graph_rows, ..options(Kind::F32) };
            let model = load_from(&source, &options).unwrap();
            let found = mixed(FewBlocks::new(model, 110, &prompts(), poison));
            let expect = expect.get_or_insert_with(|| {
                let lens: Vec<usize> = found.iter().map(Vec::len).collect();
                let on_cpu = ModelOptions { gpu: None, kv_bytes: 8 << 20, ..options.clone() };
                each_alone(CpuModel::load(&source, &on_cpu).unwrap(), &lens, |_, _| ())
            });
            assert!(found == *expect, "{layers:?} recorded for {graph_rows} rows");
        }
    }
}

#[test]
fn others_change_no_token_beyond_windows() {
    for (layers, fp8_cache) in [(LAYERS[0], false), (LAYERS[0], true), (LAYERS[1], true)] {
        let folder = tempfile::tempdir().unwrap();
        let source = source(folder.path(), layers);
        let options = ModelOptions { deterministic: true, fp8_cache, ..options(Kind::Bf16) };
        let load = || load_from(&source, &options).unwrap();
        let found = mixed(FewBlocks::new(load(), 110, &prompts(), poison));
        let lens: Vec<usize> = found.iter().map(Vec::len).collect();
        assert!(each_alone(load(), &lens, poison) == found, "{layers:?}, {fp8_cache}");
    }
}

/// The numbers of Gemma 3 12B, in bf16.
fn gemma3_12b() -> ModelConfig {
    let layer_type = |layer| if layer % 6 == 5 { "full_attention" } else { "sliding_attention" };
    let config = serde_json::json!({
        "model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 3840,
        "intermediate_size": 15_360, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024,
        "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10_000.0, "query_pre_attn_scalar": 256,
        "layer_types": (0..48).map(layer_type).collect::<Vec<_>>(),
    });
    let spec = arch::from_hf(Path::new("config.json"), config.to_string().as_bytes());
    ModelConfig { kv_kind: Kind::Bf16, ..spec.unwrap().config }
}

/// A card of 24 GB beside 8 GB of weights.
#[test]
fn a_long_context_takes_what_its_windows_show() {
    let (config, context, steps) = (gemma3_12b(), 32 << 10, [2, 2 * 512]);
    let whole = config.kv_block_bytes(context);
    let [decoding, prompt] = steps.map(|tokens| context_bytes(&config, context, 16, tokens));
    assert_eq!(whole, 12_884_901_888);
    assert!(decoding <= 2_600_000_000, "{decoding}");
    assert!(prompt <= 2_900_000_000, "{prompt}");

    let card = Emulator::card("rtx-4090", 24 << 30).unwrap();
    let budget = cache::Budget {
        total: card.memory_bytes,
        free: card.memory_bytes - (8 << 30),
        own: 8 << 30,
        share: 0.9,
        reserve: 0,
        most: None,
        state_share: 0.25,
    };
    let sizes = budget.sizes(&config, 16).unwrap();
    let contexts = sizes.bytes(&config, 16) / decoding;
    assert_eq!((contexts, sizes.bytes(&config, 16) / whole), (5, 1));
}

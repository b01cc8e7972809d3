//! Models on several emulated devices against transformers, against one device, and against
//! themselves with other sequences in the step. A machine's GPUs are not asked for: most machines
//! have one.

use super::*;
use crate::cuda::ranks::TensorParallel;
use crate::testing::GgufWriter;
use cresset_kernels::gpu::Properties;
use cresset_kernels::linear::WeightType;
use cresset_kernels::sampling::params::SamplingParams;
use std::sync::Arc;

/// Options for emulated devices with so much memory each.
pub(super) fn on_ranks(memory: &[usize], options: &ModelOptions) -> ModelOptions {
    let limits: Vec<Properties> =
        memory.iter().map(|bytes| Emulator::card("rtx-3060", *bytes).unwrap()).collect();
    let mut gpus = Emulator::group(&limits);
    let further_ranks = gpus.split_off(1);
    ModelOptions { gpu: gpus.pop(), further_ranks, gpu_memory_share: 0.5, ..*options }
}

fn load_tiny(tiny: &TinyLlama, options: &ModelOptions) -> Result<TensorParallel> {
    let folder = tempfile::tempdir().unwrap();
    tiny.write_safetensors(folder.path()).unwrap();
    TensorParallel::load(&ModelSource::hf_folder(folder.path().to_owned()), options)
}

/// What all ranks compute, which must have the same bits.
fn by_all(
    model: &mut TensorParallel,
    work: impl Fn(&mut CudaModel) -> Vec<Vec<f32>> + Clone + Send + 'static,
) -> Result<Vec<Vec<f32>>> {
    let mut all = model.ranks.each(move |model| Ok(work(model)))?;
    let first = all.remove(0);
    assert!(all.into_iter().all(|other| other == first), "the ranks differ");
    Ok(first)
}

/// Models whose attention cannot be shared, or whose columns cannot be cut, and what is said.
const NOT_SHARED: [(&str, &str); 5] = [
    ("olmo2", "as one vector"),
    ("olmo2-odd", "as one vector"),
    ("olmo3", "as one vector"),
    ("olmo3-odd", "as one vector"),
    ("gpt-oss-mxfp4", "16 of its 32 columns are no whole blocks of 32 in MXFP4"),
];

fn shared_families() -> impl Iterator<Item = Case> {
    let refused = |case: &Case| NOT_SHARED.iter().any(|(name, _)| *name == case.name);
    goldens().cases.into_iter().filter(move |case| !refused(case))
}

#[test]
fn every_family_on_two_ranks_equals_transformers() {
    let logits = logits();
    for case in shared_families() {
        check_family(&case, &rows(&logits[&case.name]), |kind| {
            let options = on_ranks(&[24 << 20; 2], &options_of(&case, kind));
            let load = |source: &ModelSource| TensorParallel::load(source, &options);
            let mut model = case.in_folder(&case.config, load)?;
            let tokens = case.tokens.clone();
            by_all(&mut model, move |model| in_parts(model, &tokens))
        });
    }
}

/// Some ranks have the same KV heads.
#[test]
fn there_may_be_more_ranks_than_kv_heads() {
    let logits = logits();
    for name in ["llama", "gemma3", "qwen2-moe"] {
        let case = crate::tests::goldens::case_of(name);
        let options = on_ranks(&[24 << 20; 4], &options_of(&case, Kind::F32));
        let load = |source: &ModelSource| TensorParallel::load(source, &options);
        let mut model = case.in_folder(&case.config, load).unwrap();
        let tokens = case.tokens.clone();
        let found = by_all(&mut model, move |model| in_parts(model, &tokens)).unwrap();
        assert_close(&found, &rows(&logits[name]), name);
    }
}

#[test]
fn models_that_cannot_be_shared_are_refused() {
    for (name, why) in NOT_SHARED {
        let case = crate::tests::goldens::case_of(name);
        let options = on_ranks(&[24 << 20; 2], &options_of(&case, Kind::F32));
        let load = |source: &ModelSource| TensorParallel::load(source, &options);
        let error = case.in_folder(&case.config, load).err().unwrap();
        let told = matches!(&error, Error::Unsupported(text) if text.contains(why));
        assert!(told, "{name}: {error}");
    }
    let refused = |tiny: &TinyLlama, ranks: usize| {
        let options = on_ranks(&vec![24 << 20; ranks], &options(Kind::F32));
        load_tiny(tiny, &options).err().unwrap().to_string()
    };
    let error = refused(&TinyLlama::default(), 3);
    assert!(error.contains("it has 4 heads, so 3 GPUs cannot share it"), "{error}");
    assert!(error.contains("engine.tensor_parallel"), "{error}");
    let heads = TinyLlama { hidden: 96, heads: 6, kv_heads: 3, ..TinyLlama::default() };
    let error = refused(&heads, 2);
    assert!(error.contains("it has 3 KV heads"), "{error}");
}

/// The bits of two runs, and of a sequence alone and beside others.
fn ranks_repeat_their_bits(is_tried: impl Fn(&str) -> bool) {
    for case in shared_families().filter(|case| is_tried(&case.name)) {
        let own = ModelOptions { deterministic: true, ..options_of(&case, Kind::Bf16) };
        let run = |in_company: bool| {
            let options = on_ranks(&[24 << 20; 2], &own);
            let load = |source: &ModelSource| TensorParallel::load(source, &options);
            let mut model = case.in_folder(&case.config, load).unwrap();
            let tokens = case.tokens.clone();
            let work = move |model: &mut CudaModel| last_logits(model, &tokens, in_company);
            by_all(&mut model, work).unwrap()
        };
        let first = run(true);
        assert_eq!(first, run(true), "{}: two runs", case.name);
        assert_eq!(first, run(false), "{}: alone", case.name);
    }
}

/// One family for each kind of layer: plain, windows, experts, states.
#[test]
fn deterministic_ranks_repeat_their_bits() {
    let tried = ["llama", "gemma3", "qwen2-moe", "qwen3-next"];
    let known = shared_families().filter(|case| tried.contains(&case.name.as_str())).count();
    assert_eq!(known, tried.len());
    ranks_repeat_their_bits(|name| tried.contains(&name));
}

#[test]
#[ignore = "takes minutes"]
fn deterministic_ranks_repeat_their_bits_in_every_family() {
    ranks_repeat_their_bits(|name| name != "llama-head-size");
}

/// The logits after each of the last tokens of a text, beside two other sequences or alone.
fn last_logits(model: &mut CudaModel, tokens: &[u32], in_company: bool) -> Vec<Vec<f32>> {
    let own: Vec<u32> = (0..4).collect();
    let others = [vec![5, 6], vec![7, 8]];
    let (begin, rest) = tokens.split_at(tokens.len() / 2);
    let mut found = Vec::new();
    for (cached, part) in [(0, begin), (begin.len(), &rest[..1]), (begin.len() + 1, &rest[1..])] {
        let span = Span { tokens: part, cached, blocks: &own };
        let beside = |(i, blocks)| Span { tokens: &tokens[i..i + 5], cached: 0, blocks };
        let company = others.iter().enumerate().map(|(i, blocks)| beside((i, &blocks[..])));
        let count = if in_company { others.len() } else { 0 };
        let spans: Vec<Span> = company.take(count).chain([span]).collect();
        let step = batch(&spans, BLOCK, true).spread(model.cache_kinds(), BLOCK);
        found.extend(model.logits(&step).pop());
    }
    found
}

/// Prompts in chunks and then greedy tokens, some steps of which are recorded and replayed, as the
/// engine asks for them.
fn greedy_tokens(model: &mut dyn Model) -> Vec<Vec<u32>> {
    let mut texts = [tokens(9, 0), tokens(21, 1), tokens(3, 2)];
    let blocks: Vec<Vec<u32>> = (0..3).map(|i| (i * 3..i * 3 + 3).collect()).collect();
    let params = Arc::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() });
    let mut computed = [0; 3];
    for _ in 0..9 {
        let before = texts.clone();
        let spans: Vec<Span> = before
            .iter()
            .zip(&blocks)
            .zip(computed)
            .map(|((text, blocks), cached)| Span { tokens: &text[cached..], cached, blocks })
            .collect();
        let row = |text: &Vec<u32>| RowSampling {
            params: params.clone(),
            tokens: Arc::new(text.clone()),
            pending: None,
            prompt_len: text.len(),
            banned: Arc::default(),
            grammar: None,
        };
        let rows: Vec<_> = texts.iter().map(row).collect();
        model.launch(&batch(&spans, BLOCK, true), &rows).unwrap();
        for ((text, computed), result) in
            texts.iter_mut().zip(&mut computed).zip(model.collect().unwrap())
        {
            *computed = text.len();
            text.push(result.unwrap().token);
        }
    }
    texts.to_vec()
}

#[test]
fn ranks_give_the_tokens_of_one_device() {
    let tiny = TinyLlama { seed: 21, ..TinyLlama::default() };
    let want = greedy_tokens(&mut load(&tiny, &options(Kind::F32)).unwrap());
    for graph_rows in [0, 8] {
        let own = ModelOptions { gpu_graph_rows: graph_rows, ..options(Kind::F32) };
        let mut model = load_tiny(&tiny, &on_ranks(&[24 << 20; 2], &own)).unwrap();
        assert_eq!(greedy_tokens(&mut model), want, "recorded for {graph_rows} rows");
    }
}

/// Weights in blocks: rows and columns are cut between blocks, and each rank keeps its own packed.
#[test]
fn quantised_weights_are_shared() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = TinyLlama { hidden: 512, intermediate: 512, tied: false, ..TinyLlama::default() };
    let mut file: GgufWriter = sizes.gguf();
    file.quantise(|name| {
        Some(if name.contains("ffn_down") { WeightType::Q6K } else { WeightType::Q4K })
    })
    .unwrap();
    let path = folder.path().join("tiny.gguf");
    std::fs::write(&path, file.to_bytes()).unwrap();
    let source = ModelSource::gguf(path);
    let text = tokens(11, 3);
    let memory = [64 << 20; 2];
    let own = |kind| ModelOptions {
        gpu: Some(Emulator::with(memory[0], 4)),
        max_rows: 11,
        gpu_graph_rows: 0,
        ..options(kind)
    };
    let exact = alone(&mut load_from(&source, &own(Kind::F32)).unwrap(), 0, &text, 11);
    let mut one = load_from(&source, &own(Kind::Bf16)).unwrap();
    let mut two = TensorParallel::load(&source, &on_ranks(&memory, &own(Kind::Bf16))).unwrap();
    let found = {
        let text = text.clone();
        by_all(&mut two, move |model| alone(model, 0, &text, 11)).unwrap()
    };
    let error = [error(&found, &exact), error(&alone(&mut one, 0, &text, 11), &exact)];
    assert!(error[0] < 0.04, "{error:?}");
    // The embedding is on both ranks, and norms and bands that are not full take little.
    let embedding = 2 * vocab_size() * 512 * 9 / 16;
    let most = one.weight_bytes() + embedding;
    assert!(two.weight_bytes() < most * 11 / 10, "{} of {most}", two.weight_bytes());

    let narrow = TinyLlama { hidden: 256, intermediate: 256, ..sizes };
    let mut file = narrow.gguf();
    file.quantise(|_| Some(WeightType::Q4K)).unwrap();
    let path = folder.path().join("narrow.gguf");
    std::fs::write(&path, file.to_bytes()).unwrap();
    let options = on_ranks(&memory, &own(Kind::Bf16));
    let error = TensorParallel::load(&ModelSource::gguf(path), &options).err().unwrap().to_string();
    let said = "2 GPUs cannot share blk.0.attn_output.weight, because 128 of its 256 columns";
    assert!(error.contains(said), "{error}");
}

/// The cache has the blocks that the fullest device has room for.
#[test]
fn the_cache_is_that_of_the_smallest_rank() {
    let blocks = |memory: &[usize]| {
        let options = on_ranks(memory, &options(Kind::F32));
        let mut model = load_tiny(&TinyLlama::default(), &options).unwrap();
        let each = model.ranks.each(|model| Ok(model.num_blocks())).unwrap();
        assert!(each.iter().all(|blocks| *blocks == model.num_blocks()), "{each:?}");
        model.num_blocks()
    };
    let (large, small) = (24 << 20, 18 << 20);
    let (fewer, more) = (blocks(&[small, small]), blocks(&[large, large]));
    assert!(fewer < more);
    // One rank may have room for a block more than another on an equal device.
    let of_smallest = [blocks(&[large, small]), blocks(&[small, large])];
    assert!(of_smallest.iter().all(|own| (fewer..=fewer + 1).contains(own)), "{of_smallest:?}");
}

/// A device that is too small ends the load on the others, and the error is its own.
#[test]
fn a_rank_that_cannot_load_ends_the_load() {
    for memory in [[24 << 20, 1 << 18], [1 << 18, 24 << 20]] {
        let options = on_ranks(&memory, &options(Kind::F32));
        let error = load_tiny(&TinyLlama::default(), &options).err().unwrap();
        let told = matches!(
            error,
            Error::OutOfMemory(_) | Error::Kernel(cresset_kernels::Error::OutOfMemory { .. })
        );
        assert!(told, "{memory:?}: {error}");
    }
}

/// A panic on one rank, and a fault of one device, end the step on all, and no later one is begun.
#[test]
fn a_rank_that_fails_ends_the_model() {
    type Failing = fn(&mut CudaModel) -> Result<()>;
    let work_of_last: [(&str, Failing); 2] = [
        ("rank 1 (of 0 to 1) panicked: a planted panic", |_| panic!("a planted panic")),
        ("the device failed", |model| {
            let step = ForwardBatch { slot_mapping: vec![u32::MAX - 7], ..one_token() };
            let shape = model.shape(&step);
            model.stage(&step, &[], shape)?;
            model.step(&shape)?;
            Ok(model.gpu().synchronise()?)
        }),
    ];
    for (told, fail) in work_of_last {
        let options = on_ranks(&[24 << 20; 2], &options(Kind::F32));
        let mut model = load_tiny(&TinyLlama::default(), &options).unwrap();
        let error = model.ranks.each(move |model| {
            if model.gpu().rank().number == 1 {
                fail(model)?;
            }
            model.logits(&one_token());
            Ok(())
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
        assert!(model.launch(&ForwardBatch::default(), &[]).is_err());
        assert!(model.recover().is_err());
    }
}

/// The first token of a sequence.
fn one_token() -> ForwardBatch {
    batch(&[Span { tokens: &[1], cached: 0, blocks: &[0] }], BLOCK, true)
}

/// A batch that contradicts itself is refused by all ranks, and the next one is computed.
#[test]
fn contradictory_batches_do_no_harm_to_ranks() {
    let options = on_ranks(&[24 << 20; 2], &options(Kind::F32));
    let mut model = load_tiny(&TinyLlama::default(), &options).unwrap();
    let error = model.launch(&one_token(), &[]).unwrap_err();
    assert!(matches!(error, Error::Batch(_)), "{error}");
    assert!(model.collect().is_err());
    assert_eq!(greedy_tokens(&mut model).len(), 3);
}

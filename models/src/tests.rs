//! Whole models: against candle-transformers' llama, across file formats, and bit for bit across
//! batches.

pub mod goldens;
pub mod quantised;

use crate::cpu::CpuModel;
use crate::testing::TinyLlama;
use crate::{Error, ForwardBatch, Model, ModelOptions, ModelSource};
use candle_core::quantized::QTensor;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig};
use cresset_kernels::gpu::Kind;
use cresset_kernels::linear::WeightType;
use std::path::Path;

const BLOCK_SIZE: usize = 16;
const BLOCKS: usize = 40;

pub fn options() -> ModelOptions {
    ModelOptions {
        threads: 2,
        kv_bytes: 64 << 20,
        block_size: BLOCK_SIZE,
        max_batched_tokens: 128,
        max_context: Some(256),
        ..ModelOptions::default()
    }
}

/// A model on the CPU with an empty cache of `BLOCKS`.
fn load(source: &ModelSource, options: &ModelOptions) -> Result<CpuModel, Error> {
    let model = CpuModel::load(source, options)?;
    let groups = model.cache_kinds().windows.len();
    Ok(model.with_blocks(BLOCKS * groups))
}

fn from_gguf(tiny: &TinyLlama) -> CpuModel {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny.write_gguf(&path).unwrap();
    load(&ModelSource::gguf(path), &options()).unwrap()
}

fn from_folder(write: impl Fn(&Path)) -> Result<CpuModel, Error> {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    load(&ModelSource::hf_folder(folder.path().to_owned()), &options())
}

pub fn tokens(count: usize, seed: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * 31 + seed * 17 + 5) % crate::testing::vocab_size()) as u32).collect()
}

/// The next tokens of a sequence, how many were cached before them, and its blocks.
pub struct Span<'a> {
    pub tokens: &'a [u32],
    pub cached: usize,
    pub blocks: &'a [u32],
}

/// Makes a batch with logits of every row, or with `last` of each sequence's last row only.
pub fn batch(spans: &[Span], block_size: usize, last: bool) -> ForwardBatch {
    let mut b = ForwardBatch { cu_seqlens_q: vec![0], ..ForwardBatch::default() };
    for span in spans {
        let len = span.cached + span.tokens.len();
        for position in span.cached..len {
            let block = span.blocks[position / block_size] as usize;
            b.positions.push(position as u32);
            b.slot_mapping.push((block * block_size + position % block_size) as u32);
        }
        b.input_ids.extend(span.tokens);
        b.cu_seqlens_q.push(b.input_ids.len() as u32);
        b.seq_lens.push(len as u32);
        b.block_tables.push(span.blocks.to_vec());
    }
    let rows = b.input_ids.len() as u32;
    b.logits_indices = if last {
        b.cu_seqlens_q[1..].iter().map(|end| end - 1).collect()
    } else {
        (0..rows).collect()
    };
    b
}

pub fn rows(logits: &Tensor) -> Vec<Vec<f32>> {
    logits.to_vec2().unwrap()
}

/// Returns the logits of a whole prompt in chunks, alone in blocks 3, 5, 7, ….
pub fn alone(model: &mut CpuModel, prompt: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let blocks: Vec<u32> = (1..19).map(|i| i * 2 + 1).collect();
    let mut out = Vec::new();
    for (i, part) in prompt.chunks(chunk).enumerate() {
        let span = Span { tokens: part, cached: i * chunk, blocks: &blocks };
        let batch = batch(&[span], BLOCK_SIZE, false).spread(model.cache_kinds(), BLOCK_SIZE);
        out.extend(rows(&model.forward(&batch).unwrap()));
    }
    out
}

pub fn assert_close(got: &[Vec<f32>], want: &[Vec<f32>], what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let largest = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let error = got.iter().zip(want).fold(0.0f32, |m, (g, w)| m.max((g - w).abs()));
        assert!(error <= 1e-4 * largest, "{what}, row {i}: error {error}, largest {largest}");
    }
}

/// A config may say that the head is the embedding beside a head that is another, and a model that
/// reads more than text what its text model denies. The files decide.
#[test]
fn a_head_that_is_stored_is_used_whatever_the_config_says() {
    for tied in [true, false] {
        let tiny = TinyLlama { tied, ..TinyLlama::default() };
        let prompt = tokens(20, 3);
        let mut plain = from_folder(|folder| tiny.write_safetensors(folder).unwrap()).unwrap();
        let mut text = tiny.hf_config();
        text["tie_word_embeddings"] = false.into();
        let config = serde_json::json!({
            "model_type": "larger", "tie_word_embeddings": true, "text_config": text,
        });
        let mut part = from_folder(|folder| {
            tiny.write_safetensors(folder).unwrap();
            std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        })
        .unwrap();
        let want = alone(&mut plain, &prompt, 20);
        assert_eq!(alone(&mut part, &prompt, 20), want, "{tied}");
        let mut config = tiny.hf_config();
        config["tie_word_embeddings"] = true.into();
        let mut wrong = from_folder(|folder| {
            tiny.write_safetensors(folder).unwrap();
            std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        })
        .unwrap();
        assert_eq!(alone(&mut wrong, &prompt, 20), want, "{tied}, and the config says yes");
    }
}

fn shapes() -> Vec<TinyLlama> {
    vec![
        TinyLlama { seed: 1, ..TinyLlama::default() },
        TinyLlama { seed: 2, tied: false, heads: 4, kv_heads: 4, ..TinyLlama::default() },
        TinyLlama {
            seed: 3,
            hidden: 96,
            heads: 6,
            kv_heads: 1,
            layers: 3,
            intermediate: 160,
            ..TinyLlama::default()
        },
    ]
}

/// Runs candle-transformers' llama on the same folder, token by token.
fn oracle(
    tiny: &TinyLlama,
    prompt: &[u32],
    rope_scaling: Option<serde_json::Value>,
) -> Vec<Vec<f32>> {
    let folder = tempfile::tempdir().unwrap();
    tiny.write_safetensors(folder.path()).unwrap();
    let mut config = tiny.hf_config();
    config["rope_scaling"] = rope_scaling.into();
    let config: LlamaConfig = serde_json::from_value(config).unwrap();
    let config = config.into_config(false);
    let weights = std::fs::read(folder.path().join("model.safetensors")).unwrap();
    let weights = VarBuilder::from_buffered_safetensors(weights, DType::F32, &Device::Cpu).unwrap();
    let llama = Llama::load(weights, &config).unwrap();
    let mut cache = Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
    let mut step = |(i, id): (usize, &u32)| {
        let input = Tensor::new(&[*id], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        llama.forward(&input, i, &mut cache).unwrap().squeeze(0).unwrap().to_vec1().unwrap()
    };
    prompt.iter().enumerate().map(&mut step).collect()
}

#[test]
fn equals_candles_llama_token_by_token() {
    let prompt = tokens(70, 1);
    for tiny in shapes() {
        let want = oracle(&tiny, &prompt, None);
        let mut ours = from_folder(|f| tiny.write_safetensors(f).unwrap()).unwrap();
        assert_close(&alone(&mut ours, &prompt, 1), &want, "token by token");
        assert_close(&alone(&mut ours, &prompt, 70), &want, "in one step");
        assert_close(&alone(&mut from_gguf(&tiny), &prompt, 33), &want, "from GGUF");
    }
}

#[test]
fn equals_candles_llama_with_llama_3_scaling() {
    let scaling = serde_json::json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
    // candle writes the type as a plain enum inside the same object.
    let (tiny, prompt) = (TinyLlama { seed: 4, ..TinyLlama::default() }, tokens(90, 2));
    let want = oracle(&tiny, &prompt, Some(scaling.clone()));
    let mut ours = from_folder(|f| {
        tiny.write_safetensors(f).unwrap();
        let mut config = tiny.hf_config();
        config["rope_scaling"] = scaling.clone();
        std::fs::write(f.join("config.json"), config.to_string()).unwrap();
    })
    .unwrap();
    assert_close(&alone(&mut ours, &prompt, 90), &want, "in one step");
}

#[test]
fn shards_hold_what_one_file_holds() {
    let tiny = TinyLlama { seed: 5, ..TinyLlama::default() };
    let prompt = tokens(20, 3);
    let [mut one, mut two] = [
        from_folder(|f| tiny.write_safetensors(f).unwrap()).unwrap(),
        from_folder(|f| tiny.write_sharded(f).unwrap()).unwrap(),
    ];
    assert_eq!(alone(&mut one, &prompt, 20), alone(&mut two, &prompt, 20));
}

#[test]
fn bits_do_not_depend_on_chunks() {
    let mut model = from_gguf(&TinyLlama { seed: 6, ..TinyLlama::default() });
    let prompt = tokens(100, 4);
    let whole = alone(&mut model, &prompt, 100);
    for chunk in [1, 7, 16] {
        assert_eq!(alone(&mut model, &prompt, chunk), whole, "chunks of {chunk}");
    }
}

/// A decode, a whole prompt, a later chunk and a one-token prompt in one step have the bits that
/// each has alone.
#[test]
fn bits_do_not_depend_on_the_batch() {
    let mut model = from_gguf(&TinyLlama { seed: 7, ..TinyLlama::default() });
    let prompts = [tokens(41, 1), tokens(30, 2), tokens(64, 3), tokens(1, 4)];
    let cached = [40, 0, 37, 0];
    let blocks: Vec<Vec<u32>> =
        (0..4).map(|i| (0..5).map(|j| (j * 7 + i * 9 + 1) as u32 % 40).collect()).collect();
    for i in 0..4 {
        if cached[i] > 0 {
            let span = Span { tokens: &prompts[i][..cached[i]], cached: 0, blocks: &blocks[i] };
            let mut step = batch(&[span], BLOCK_SIZE, true);
            step.logits_indices.clear();
            assert_eq!(model.forward(&step).unwrap().dims(), [0, crate::testing::vocab_size()]);
        }
    }
    let span =
        |i: usize| Span { tokens: &prompts[i][cached[i]..], cached: cached[i], blocks: &blocks[i] };
    let step = batch(&[span(0), span(1), span(2), span(3)], BLOCK_SIZE, true);
    let together = rows(&model.forward(&step).unwrap());
    for (i, prompt) in prompts.iter().enumerate() {
        let alone = alone(&mut model, prompt, prompt.len());
        assert_eq!(&together[i], alone.last().unwrap(), "sequence {i}");
    }
}

#[test]
fn the_exact_mode_equals_f32_weights() {
    let tiny = TinyLlama { seed: 8, ..TinyLlama::default() };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny.write_gguf(&path).unwrap();
    let mut exact =
        load(&ModelSource::gguf(path), &ModelOptions { dequantise: true, ..options() }).unwrap();
    let prompt = tokens(9, 1);
    assert_eq!(alone(&mut exact, &prompt, 9), alone(&mut from_gguf(&tiny), &prompt, 9));
}

#[test]
fn beside_quantised_weights_keys_and_values_take_half() {
    let mut file = TinyLlama { seed: 9, ..TinyLlama::default() }.gguf();
    for (_, shape, dtype, data) in file.tensors.iter_mut().filter(|(_, shape, ..)| shape.len() == 2)
    {
        let values = Tensor::from_raw_buffer(data, DType::F32, shape, &Device::Cpu).unwrap();
        *dtype = WeightType::Q8_0;
        *data = QTensor::quantize(&values, dtype.in_candle().unwrap())
            .unwrap()
            .data()
            .unwrap()
            .into_owned();
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    std::fs::write(&path, file.to_bytes()).unwrap();
    let [mut fast, mut exact] = [false, true].map(|dequantise| {
        load(&ModelSource::gguf(path.clone()), &ModelOptions { dequantise, ..options() }).unwrap()
    });
    let bytes = |model: &CpuModel| model.config().kv_block_bytes(BLOCK_SIZE);
    assert_eq!((bytes(&fast) * 2, fast.config().kv_kind), (bytes(&exact), Kind::F16));
    let prompt = tokens(90, 3);
    let whole = alone(&mut fast, &prompt, 90);
    assert_eq!(alone(&mut fast, &prompt, 1), whole, "token by token");
    for (got, want) in whole.iter().zip(alone(&mut exact, &prompt, 90)) {
        let largest = want.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let error = got.iter().zip(&want).fold(0f32, |error, (g, w)| error.max((g - w).abs()));
        assert!(error < 1e-2 * largest, "error {error}, largest {largest}");
    }
}

#[test]
fn contradictory_batches_are_refused() {
    let mut model = from_gguf(&TinyLlama::default());
    let prompt = tokens(20, 1);
    let good = batch(&[Span { tokens: &prompt, cached: 0, blocks: &[4, 9] }], BLOCK_SIZE, true);
    model.forward(&good).unwrap();
    let breaks: [(&str, fn(&mut ForwardBatch)); 12] = [
        ("vocabulary", |b| b.input_ids[3] = 100_000),
        ("needs position", |b| b.positions[3] = 4),
        ("needs position", |b| b.slot_mapping[3] = 4 * 16 + 4),
        ("outside the cache", |b| b.block_tables[0][1] = 40),
        ("needs position", |b| b.block_tables[0] = vec![9, 4]),
        ("blocks of", |b| b.block_tables[0] = vec![4]),
        ("do not agree", |b| b.cu_seqlens_q = vec![0, 19]),
        ("do not agree", |b| {
            *b = ForwardBatch { cu_seqlens_q: vec![0], ..ForwardBatch::default() }
        }),
        ("do not agree", |b| b.feedback = vec![None; 19]),
        ("result of the previous step", |b| b.feedback = vec![Some(0); 20]),
        ("logits are wanted", |b| b.logits_indices = vec![20]),
        ("beyond the context", |b| b.seq_lens[0] = 257),
    ];
    for (message, break_it) in breaks {
        let mut bad = good.clone();
        break_it(&mut bad);
        match model.forward(&bad) {
            Err(Error::Batch(text)) => {
                assert!(text.contains(message), "{text:?} does not say {message:?}");
            }
            other => panic!("{message}: {other:?}"),
        }
    }
    let long = tokens(129, 1);
    let long = batch(
        &[Span { tokens: &long, cached: 0, blocks: &(0..9).collect::<Vec<_>>() }],
        BLOCK_SIZE,
        true,
    );
    assert!(matches!(model.forward(&long), Err(Error::Batch(_))));
}

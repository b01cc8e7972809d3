//! Tiny random models of every family with the logits that transformers computed for them, and
//! blocks of every format with their values, built into the executable: so the kernels of a machine
//! can be compared with an independent implementation wherever they run.
//!
//! Weights follow from the tensors' names (`goldens/make_architecture_goldens.py`).

use crate::{Error, ForwardBatch, Model, ModelOptions, ModelSource, Result};
use candle_core::{DType, Device, Tensor};
use cresset_kernels::Compute;
use cresset_kernels::linear::WeightType;
use cresset_kernels::linear::{Linear, LinearArgs, Mode, Weight};
use cresset_kernels::sampling::RowSampling;
use cresset_kernels::sampling::params::{SamplingParams, TokenLogprobs};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CASES: &str = include_str!("../goldens/architectures.json");
const LOGITS: &[u8] = include_bytes!("../goldens/architectures.safetensors");
/// Blocks in the formats of GGUF, and in those of Hugging Face's folders.
const BLOCKS: [&[u8]; 2] = [
    include_bytes!("../goldens/blocks.safetensors"),
    include_bytes!("../goldens/quantised_blocks.safetensors"),
];

/// Alternatives that are compared at each position.
const TOP: u8 = 20;

/// The ends of the names of Gemma 4's norms and factors.
const AROUND_ONE: [&str; 5] =
    ["norm.weight", "norm_1.weight", "norm_2.weight", "layer_scalar", "scale"];

#[derive(Deserialize)]
pub struct GoldenModels {
    pub cases: Vec<GoldenModel>,
}

#[derive(Deserialize)]
pub struct GoldenModel {
    pub name: String,
    /// Type of the stored weights.
    dtype: StoredType,
    pub config: serde_json::Value,
    /// The same config in the layout of earlier versions.
    pub older_config: serde_json::Value,
    pub tensors: BTreeMap<String, Vec<usize>>,
    pub tokens: Vec<u32>,
    /// The GGUF file's metadata, if it can hold all of the config.
    pub gguf: Option<ConvertedModel>,
}

#[derive(Clone, Copy, Deserialize)]
enum StoredType {
    F32,
    F16,
    BF16,
}

/// What llama.cpp's converter makes of a model.
#[derive(Deserialize)]
pub struct ConvertedModel {
    pub metadata: BTreeMap<String, serde_json::Value>,
    /// Tensors that the checkpoint does not have.
    pub extra: BTreeMap<String, Vec<f32>>,
    /// First eight bytes of the SHA-256 of each tensor.
    pub digests: BTreeMap<String, String>,
}

/// Uniform in [-1, 1): SplitMix64 seeded by the FNV-1a hash of the name, 24 bits of each.
fn random(name: &str, count: usize) -> impl Iterator<Item = f32> {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, fnv);
    (1..=count as u64).map(move |i| {
        let mut mixed = seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// All models.
pub fn goldens() -> GoldenModels {
    serde_json::from_str(CASES).expect("invariant: the embedded models are valid")
}

/// The logits of every model by its name, `[tokens, vocab_size]` each.
pub fn logits() -> HashMap<String, Tensor> {
    stored(LOGITS)
}

/// `NAME.raw` and `NAME.values` of every format of blocks.
pub fn blocks() -> HashMap<String, Tensor> {
    BLOCKS.into_iter().flat_map(stored).collect()
}

fn stored(bytes: &[u8]) -> HashMap<String, Tensor> {
    candle_core::safetensors::load_buffer(bytes, &Device::Cpu)
        .expect("invariant: the embedded tensors are valid")
}

impl GoldenModel {
    pub fn kind(&self) -> &str {
        self.config["model_type"].as_str().unwrap_or_default()
    }

    pub fn weights(&self, name: &str, shape: &[usize]) -> Vec<f32> {
        let (scale, shift) = match shape {
            // Small beside the epsilon of the norm behind it.
            [_, cols] if name.ends_with("q_a_proj.weight") => (0.05 / (*cols as f32).sqrt(), 0.0),
            [_, cols] if name.ends_with("_proj.weight") => (2.5 / (*cols as f32).sqrt(), 0.0),
            _ if self.is_gemma4() && AROUND_ONE.iter().any(|end| name.ends_with(end)) => (0.2, 1.0),
            _ if name.ends_with("norm.weight") => {
                (0.2, if self.less_one(name) { 0.0 } else { 1.0 })
            }
            // A state lasts for some ten tokens.
            _ if name.ends_with("A_log") => (1.0, -3.0),
            _ if name.ends_with("sinks") => (2.0, 0.0),
            _ => (0.5, 0.0),
        };
        random(name, shape.iter().product())
            .map(|x| self.dtype.rounded(x * scale + shift))
            .collect()
    }

    fn is_gemma4(&self) -> bool {
        self.kind().starts_with("gemma4")
    }

    /// Whether the matrices of experts are in MXFP4.
    pub fn is_quantised(&self) -> bool {
        self.config.get("quantization_config").is_some()
    }

    /// The codes or the scales of a tensor in MXFP4. The scales are powers of two that are of use.
    pub fn blocks(name: &str, shape: &[usize]) -> Option<Vec<u8>> {
        let bytes = || random(name, shape.iter().product()).map(|x| ((x + 1.0) * 128.0) as u8);
        if name.ends_with("_blocks") {
            Some(bytes().collect())
        } else if name.ends_with("_scales") {
            Some(bytes().map(|x| 121 + x % 4).collect())
        } else {
            None
        }
    }

    /// Whether one is added to the stored weights of a norm.
    fn less_one(&self, name: &str) -> bool {
        let plain = name.ends_with("linear_attn.norm.weight");
        let kinds = ["gemma", "qwen3_5", "qwen3_next"];
        !plain && kinds.iter().any(|kind| self.kind().starts_with(kind))
    }

    /// Writes the model in Hugging Face's layout.
    pub fn write(&self, folder: &Path, config: &serde_json::Value) -> Result<()> {
        let bytes = |(name, shape): (&String, &Vec<usize>)| {
            Self::blocks(name, shape).unwrap_or_else(|| {
                let values = self.weights(name, shape).into_iter();
                values.flat_map(|x| self.dtype.bytes(x)).collect()
            })
        };
        let data: Vec<Vec<u8>> = self.tensors.iter().map(bytes).collect();
        let mut views = Vec::with_capacity(data.len());
        for ((name, shape), data) in self.tensors.iter().zip(&data) {
            let is_bytes = Self::blocks(name, &[]).is_some();
            let dtype = if is_bytes { Dtype::U8 } else { self.dtype.stored() };
            let view = TensorView::new(dtype, shape.clone(), data);
            views.push((name, view.expect("invariant: a shape has as many values")));
        }
        let file = folder.join("model.safetensors");
        safetensors::serialize_to_file(views, None, &file).map_err(candle_core::Error::from)?;
        let path = folder.join("config.json");
        std::fs::write(&path, config.to_string()).map_err(|source| Error::Io { path, source })
    }
}

impl StoredType {
    fn rounded(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::F16 => f16::from_f32(x).to_f32(),
            Self::BF16 => bf16::from_f32(x).to_f32(),
        }
    }

    fn bytes(self, x: f32) -> Vec<u8> {
        match self {
            Self::F32 => x.to_le_bytes().to_vec(),
            Self::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
            Self::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        }
    }

    fn stored(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::BF16 => Dtype::BF16,
        }
    }
}

/// How far this machine's kernels are from the stored values of a model or of a format.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelError {
    pub name: String,
    /// Largest difference of a log-probability among the most likely; 0 of a format.
    pub most: f64,
    /// Sum of the squares of the differences, relative to that of the values.
    pub relative: f64,
    /// Whether the values come through rounded activations.
    pub rounded: bool,
}

/// Computes every model in f32 with as many threads as `compute` has, and multiplies with every
/// format as it does. Writes the models' files into `scratch`, one after the other.
pub fn kernel_errors(compute: &Compute, scratch: &Path) -> Result<Vec<KernelError>> {
    let logits = logits();
    let mut all = Vec::new();
    for model in goldens().cases {
        let want: Vec<Vec<f32>> = logits[&model.name].to_vec2()?;
        model.write(scratch, &model.config)?;
        let tokens = model.tokens.len();
        // The products with blocks are compared on their own, since they round activations.
        let dequantise = model.is_quantised();
        let options = ModelOptions { dequantise, ..options(compute.threads(), tokens) };
        let source = ModelSource::hf_folder(scratch.to_owned());
        let mut loaded = crate::load(&source, &options)?;
        for chunk in [1, 7, tokens] {
            let found = forward(&mut *loaded, &model.tokens, chunk, options.block_size)?;
            all.push(distance(format!("{} by {chunk}", model.name), &found, &want));
        }
    }
    for dtype in FORMATS {
        all.push(product(compute, dtype)?);
    }
    Ok(all)
}

fn options(threads: usize, tokens: usize) -> ModelOptions {
    ModelOptions {
        threads,
        kv_bytes: 1 << 20,
        max_batched_tokens: tokens,
        max_rows: tokens,
        max_context: Some(tokens),
        ..ModelOptions::default()
    }
}

/// The most likely tokens after each token of a text that is computed in chunks.
fn forward(
    model: &mut dyn Model,
    tokens: &[u32],
    chunk: usize,
    block_size: usize,
) -> Result<Vec<TokenLogprobs>> {
    let mut found = Vec::new();
    let params = Arc::new(SamplingParams {
        temperature: 0.0,
        logprobs: Some(TOP),
        ..SamplingParams::default()
    });
    for (index, part) in tokens.chunks(chunk).enumerate() {
        let first = index * chunk;
        let positions = (first as u32)..(first + part.len()) as u32;
        let batch = batch_of(part, first, tokens.len().div_ceil(block_size));
        let batch = batch.spread(model.cache_kinds(), block_size);
        let row = |position: u32| RowSampling {
            params: params.clone(),
            tokens: Arc::new(tokens[..=position as usize].to_vec()),
            pending: None,
            prompt_len: position as usize + 1,
            banned: Arc::default(),
            grammar: None,
        };
        model.launch(&batch, &positions.map(row).collect::<Vec<_>>())?;
        for sampled in model.collect()? {
            let sampled = sampled.map_err(|error| Error::Batch(error.to_string()))?;
            found.extend(sampled.logprobs);
        }
    }
    Ok(found)
}

/// The tokens of one sequence from `first` on, which has the first blocks; each gets logits.
fn batch_of(part: &[u32], first: usize, blocks: usize) -> ForwardBatch {
    let positions = (first as u32)..(first + part.len()) as u32;
    ForwardBatch {
        input_ids: part.to_vec(),
        feedback: Vec::new(),
        positions: positions.clone().collect(),
        cu_seqlens_q: vec![0, part.len() as u32],
        seq_lens: vec![positions.end],
        block_tables: vec![(0..blocks as u32).collect()],
        slot_mapping: positions.collect(),
        logits_indices: (0..part.len() as u32).collect(),
        ..ForwardBatch::default()
    }
}

fn distance(name: String, found: &[TokenLogprobs], want: &[Vec<f32>]) -> KernelError {
    let (mut most, mut errors, mut squares) = (0f64, 0.0, 0.0);
    for (found, logits) in found.iter().zip(want) {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|x| f64::from(x - largest).exp()).sum();
        for (id, ours) in &found.top {
            let theirs = f64::from(logits[*id as usize] - largest) - sum.ln();
            let error = (f64::from(*ours) - theirs).abs();
            most = most.max(error);
            (errors, squares) = (errors + error * error, squares + theirs * theirs);
        }
    }
    // A missing row is as far as can be.
    let complete = found.len() == want.len();
    let relative = if complete { errors / squares } else { f64::INFINITY };
    KernelError { name, most, relative, rounded: false }
}

/// Every format of blocks that weights may have.
pub const FORMATS: [WeightType; 32] = [
    WeightType::Q4_0,
    WeightType::Q4_1,
    WeightType::Q5_0,
    WeightType::Q5_1,
    WeightType::Q8_0,
    WeightType::Q2K,
    WeightType::Q3K,
    WeightType::Q4K,
    WeightType::Q5K,
    WeightType::Q6K,
    WeightType::IQ4NL,
    WeightType::IQ4XS,
    WeightType::IQ3S,
    WeightType::IQ3XXS,
    WeightType::IQ2S,
    WeightType::IQ2XS,
    WeightType::IQ2XXS,
    WeightType::IQ1S,
    WeightType::IQ1M,
    WeightType::MXFP4,
    WeightType::TQ1_0,
    WeightType::TQ2_0,
    WeightType::Int4By32,
    WeightType::Int4By64,
    WeightType::Int4By128,
    WeightType::Int8By32,
    WeightType::Int8By128,
    WeightType::E4M3By32,
    WeightType::E4M3By128,
    WeightType::E5M2By32,
    WeightType::F16,
    WeightType::BF16,
];

/// Multiplies random activations with the stored blocks of a format, and the stored values with
/// them in f64.
fn product(compute: &Compute, dtype: WeightType) -> Result<KernelError> {
    const ROWS: usize = 5;
    let name = dtype.name();
    let blocks = blocks();
    let raw = blocks[&format!("{name}.raw")].flatten_all()?.to_vec1::<u8>()?;
    let values: Vec<Vec<f32>> = blocks[&format!("{name}.values")].to_vec2()?;
    let (rows, cols) = (values.len(), values[0].len());
    let weight = Weight::from_ggml(dtype, &raw, rows, cols)?;
    let x: Vec<f32> = random(name, ROWS * cols).collect();
    let input = Tensor::from_slice(&x, (ROWS, cols), &Device::Cpu)?;
    let out = Tensor::zeros((ROWS, rows), DType::F32, &Device::Cpu)?;
    compute.linear(&LinearArgs {
        x: (&input).into(),
        w: &weight,
        bias: None,
        out: (&out).into(),
        mode: Mode::Invariant,
    })?;
    let relative = squares_off(&x, &values, &out.to_vec2()?);
    let rounded = !["F16", "BF16"].contains(&name) && !name.starts_with("F8");
    Ok(KernelError { name: name.to_owned(), most: 0.0, relative, rounded })
}

/// Squares of the differences between products and those in f64, relative to the latter's.
fn squares_off(x: &[f32], values: &[Vec<f32>], found: &[Vec<f32>]) -> f64 {
    let (mut errors, mut squares) = (0.0, 0.0);
    for (x, found) in x.chunks_exact(x.len() / found.len()).zip(found) {
        for (values, found) in values.iter().zip(found) {
            let products = x.iter().zip(values).map(|(x, w)| f64::from(*x) * f64::from(*w));
            let want: f64 = products.sum();
            errors += (f64::from(*found) - want).powi(2);
            squares += want * want;
        }
    }
    errors / squares
}

/// A folder of its own below another, removed when it is dropped.
pub struct KernelScratch(pub PathBuf);

impl KernelScratch {
    pub fn within(folder: &Path) -> Result<Self> {
        let path = folder.join(format!("kernels-{}", std::process::id()));
        let made = std::fs::create_dir_all(&path);
        made.map_err(|source| Error::Io { path: path.clone(), source })?;
        Ok(Self(path))
    }
}

impl Drop for KernelScratch {
    fn drop(&mut self) {
        // What is left is found in the data folder and does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

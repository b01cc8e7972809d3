//! Tiny random models with a real tokenizer inside, in both file formats, for tests of this and
//! other crates.

mod gguf_writer;
mod golden_folder;
mod guess_goldens;
mod tokenizer;

pub use gguf_writer::GgufWriter;
pub use golden_folder::GoldenFolder;
pub use guess_goldens::{GuessGolden, guess_goldens};

use crate::loader::gguf::Value;
use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;

/// The shape of a random llama and the seed of its weights.
#[derive(Clone, Debug)]
pub struct TinyLlama {
    pub seed: u64,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub max_positions: usize,
    pub tied: bool,
}

impl Default for TinyLlama {
    fn default() -> Self {
        Self {
            seed: 0,
            hidden: 64,
            intermediate: 96,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            max_positions: 2048,
            tied: true,
        }
    }
}

/// Writes a default-shaped model as one GGUF file: f32 weights, byte-level BPE of [`vocab_size`]
/// tokens, ChatML template.
pub fn tiny_llama_gguf(path: &Path, seed: u64) -> io::Result<()> {
    TinyLlama { seed, ..TinyLlama::default() }.write_gguf(path)
}

/// Writes the same model as a folder in Hugging Face layout.
pub fn tiny_llama_safetensors(folder: &Path, seed: u64) -> io::Result<()> {
    TinyLlama { seed, ..TinyLlama::default() }.write_safetensors(folder)
}

/// Number of tokens of the tiny models: 3 special ones, all bytes, some merges.
pub fn vocab_size() -> usize {
    tokenizer::tokens().len()
}

const EPS: f32 = 1e-5;
const THETA: f32 = 10_000.0;

/// A tensor by its HF name, shape and values.
type Named = (String, Vec<usize>, Vec<f32>);

impl TinyLlama {
    /// Every weight in HF's layout.
    fn tensors(&self) -> Vec<Named> {
        let (h, i, head_dim) = (self.hidden, self.intermediate, self.hidden / self.heads);
        let kv = self.kv_heads * head_dim;
        let mut shapes = vec![
            ("model.embed_tokens.weight".to_owned(), vec![vocab_size(), h]),
            ("model.norm.weight".to_owned(), vec![h]),
        ];
        if !self.tied {
            shapes.push(("lm_head.weight".to_owned(), vec![vocab_size(), h]));
        }
        for layer in 0..self.layers {
            for (name, shape) in [
                ("input_layernorm", vec![h]),
                ("post_attention_layernorm", vec![h]),
                ("self_attn.q_proj", vec![h, h]),
                ("self_attn.k_proj", vec![kv, h]),
                ("self_attn.v_proj", vec![kv, h]),
                ("self_attn.o_proj", vec![h, h]),
                ("mlp.gate_proj", vec![i, h]),
                ("mlp.up_proj", vec![i, h]),
                ("mlp.down_proj", vec![h, i]),
            ] {
                shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
            }
        }
        let mut random = Random(self.seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        shapes.into_iter().map(|(name, shape)| random.tensor(name, shape)).collect()
    }

    pub fn write_safetensors(&self, folder: &Path) -> io::Result<()> {
        write_texts(folder, &self.hf_config())?;
        self.write_shard(&folder.join("model.safetensors"), |_| true)
    }

    /// Writes the same with the matrices of the layers in floats of eight bits (E4M3), of which
    /// each row has a scale.
    pub fn write_e4m3(&self, folder: &Path) -> io::Result<()> {
        let mut config = self.hf_config();
        config["quantization_config"] =
            json!({"quant_method": "fp8", "activation_scheme": "dynamic"});
        write_texts(folder, &config)?;
        let tensors =
            self.tensors().into_iter().map(coded).collect::<candle_core::Result<Vec<_>>>();
        let tensors: HashMap<_, _> =
            tensors.map_err(io::Error::other)?.into_iter().flatten().collect();
        candle_core::safetensors::save(&tensors, folder.join("model.safetensors"))
            .map_err(io::Error::other)
    }

    /// Writes the same in two shards with an index.
    pub fn write_sharded(&self, folder: &Path) -> io::Result<()> {
        write_texts(folder, &self.hf_config())?;
        let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        let second = |name: &str| name.contains("layers.1.");
        let map: BTreeMap<String, &str> = self
            .tensors()
            .into_iter()
            .map(|(name, ..)| (name.clone(), shards[usize::from(second(&name))]))
            .collect();
        let index = json!({"metadata": {}, "weight_map": map});
        std::fs::write(folder.join("model.safetensors.index.json"), index.to_string())?;
        self.write_shard(&folder.join(shards[0]), |name| !second(name))?;
        self.write_shard(&folder.join(shards[1]), second)
    }

    fn write_shard(&self, path: &Path, keep: impl Fn(&str) -> bool) -> io::Result<()> {
        let tensors: Vec<Named> =
            self.tensors().into_iter().filter(|(name, ..)| keep(name)).collect();
        let bytes: Vec<Vec<u8>> = tensors.iter().map(|(_, _, data)| little_endian(data)).collect();
        let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytes)
                .expect("invariant: as many bytes as the shape needs");
            (name, view)
        });
        safetensors::serialize_to_file(views, None, path).map_err(io::Error::other)
    }

    /// The `config.json`.
    pub fn hf_config(&self) -> serde_json::Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab_size(),
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied,
            "attention_bias": false,
            "bos_token_id": tokenizer::IM_START,
            "eos_token_id": tokenizer::IM_END,
            "torch_dtype": "float32",
        })
    }

    pub fn write_gguf(&self, path: &Path) -> io::Result<()> {
        std::fs::write(path, self.gguf().to_bytes())
    }

    /// Returns the GGUF file, to be changed before it is written.
    pub fn gguf(&self) -> GgufWriter {
        let mut writer = GgufWriter::default();
        let size = |n: usize| Value::U32(u32::try_from(n).expect("invariant: tiny sizes"));
        for (key, value) in [
            ("general.architecture", Value::String("llama".into())),
            ("general.name", Value::String("Tiny Llama".into())),
            ("llama.block_count", size(self.layers)),
            ("llama.context_length", size(self.max_positions)),
            ("llama.embedding_length", size(self.hidden)),
            ("llama.feed_forward_length", size(self.intermediate)),
            ("llama.attention.head_count", size(self.heads)),
            ("llama.attention.head_count_kv", size(self.kv_heads)),
            ("llama.attention.layer_norm_rms_epsilon", Value::F32(EPS)),
            ("llama.rope.freq_base", Value::F32(THETA)),
            ("llama.rope.dimension_count", size(self.hidden / self.heads)),
            ("llama.vocab_size", size(vocab_size())),
        ] {
            writer.metadata.push((key.to_owned(), value));
        }
        writer.metadata.extend(tokenizer::gguf_metadata());
        for (name, shape, mut data) in self.tensors() {
            if name.contains("q_proj") || name.contains("k_proj") {
                data = interleaved(&data, shape[1], self.hidden / self.heads);
            }
            let name = crate::loader::names::gguf(&name, &[])
                .expect("invariant: every llama tensor has a GGUF name");
            writer.f32(&name, &shape, &data);
        }
        writer
    }
}

/// Writes the `config.json` and the tokenizer.
fn write_texts(folder: &Path, config: &serde_json::Value) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("config.json"), config.to_string())?;
    std::fs::write(folder.join("tokenizer.json"), tokenizer::hf_tokenizer().to_string())?;
    let words = tokenizer::hf_tokenizer_config().to_string();
    std::fs::write(folder.join("tokenizer_config.json"), words)
}

/// A tensor as a folder of E4M3 keeps it: the matrices of layers as codes, and the scales of their
/// rows under a name of their own.
fn coded((name, shape, data): Named) -> candle_core::Result<Vec<(String, Tensor)>> {
    const LARGEST: f64 = 448.0;
    let whole = Tensor::from_vec(data, shape, &Device::Cpu)?;
    if !name.contains("_proj") {
        return Ok(vec![(name, whole)]);
    }
    let scales = (whole.abs()?.max_keepdim(1)? / LARGEST)?;
    let codes = whole.broadcast_div(&scales)?.to_dtype(DType::F8E4M3)?;
    let of_scales = name.replace(".weight", ".weight_scale");
    Ok(vec![(name, codes), (of_scales, scales)])
}

/// GGUF's llama rotates adjacent pairs: within each head of Q and K, row i and row i + d/2 become
/// neighbours.
pub(crate) fn interleaved(data: &[f32], cols: usize, head_dim: usize) -> Vec<f32> {
    let source =
        |row: usize| row / head_dim * head_dim + row % head_dim / 2 + row % 2 * (head_dim / 2);
    (0..data.len() / cols).flat_map(|row| data[source(row) * cols..][..cols].to_vec()).collect()
}

pub(crate) fn little_endian(data: &[f32]) -> Vec<u8> {
    data.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// A linear congruential generator.
struct Random(u64);

impl Random {
    /// Uniform in (-1, 1).
    fn next(&mut self) -> f32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Makes norm weights around one, and matrices scaled so that activations keep their size and
    /// attention is not flat.
    fn tensor(&mut self, name: String, shape: Vec<usize>) -> Named {
        let (scale, shift) = match shape[..] {
            [_] => (0.2, 1.0),
            [_, cols] if name.contains("_proj") => (2.5 / (cols as f32).sqrt(), 0.0),
            _ => (1.0, 0.0),
        };
        let data = (0..shape.iter().product()).map(|_| self.next() * scale + shift).collect();
        (name, shape, data)
    }
}

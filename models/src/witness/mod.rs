//! A second implementation of a release's model, as a witness of the one that serves:
//! candle-transformers' own models in f32, on the CPU or with candle's own kernels on a GPU. It
//! shares nothing with the serving path but the file: candle reads and dequantises the weights, and
//! the shape is read from the metadata a second time, in `facts`. Only blocks of a type that candle
//! lacks are read by this crate (`lacking`).
//!
//! candle's Llama and Mistral return the logits of the last token only, so models of their shape
//! are computed by candle's Qwen 2, whose layer is theirs with biases, which are zeros here. What
//! candle's models lack a part of, or what is too large to be held in f32, is computed layer by
//! layer (`by_layer`). What there is no witness for is said in a sentence.

mod absence;
mod by_layer;
mod facts;
mod files;
mod lacking;
#[cfg(test)]
mod tests;

pub use absence::Absence;
pub use facts::{declared_ends, hyper_parameters};
pub use files::{TensorStats, tensor_stats};

use crate::ModelSource;
use absence::{WitnessResult, unknown};
use by_layer::{LayerWitness, head_rows};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::{gemma2, gemma3, llama, mistral, qwen2, qwen3};
use facts::{Facts, Family, Rotation};
use files::WeightFiles;
use std::collections::HashMap;

/// Tokens of a forward pass whose model gives the states of all of them.
const CHUNK: usize = 512;
/// Tokens of a forward pass whose model gives the logits of the last one only.
const SHORT_CHUNK: usize = 8;

/// Larger weights in f32 are read, computed with and given up layer by layer.
const WHOLE_BYTES: u64 = 1 << 30;

pub struct Witness {
    computation: Computation,
    /// The name of the implementation, for reports.
    pub name: String,
    /// Bytes of the weights in f32 that are in memory at a time.
    pub bytes: u64,
}

enum Computation {
    Whole(Box<Whole>),
    ByLayer(Box<LayerWitness>),
}

/// One of candle's models.
struct Whole {
    network: Network,
    /// `[vocab_size, hidden]`, for networks that give states instead of logits.
    head: Tensor,
    /// Tokens that a query sees, if any layer has a window.
    window: Option<usize>,
}

enum Network {
    Qwen2(qwen2::Model),
    Qwen3(qwen3::Model),
    Llama(Box<llama::Llama>, Box<llama::Cache>),
    Mistral(Box<mistral::Model>),
    Gemma2(Box<gemma2::Model>),
    Gemma3(Box<gemma3::Model>),
}

impl Witness {
    /// Loads the model for texts of up to `positions` tokens, onto the GPU of this number or for
    /// the CPU. A larger one than a GiB in f32 is computed layer by layer, and so is one of which
    /// candle has no model. `max_bytes` bounds what is in memory at a time.
    pub fn load(
        source: &ModelSource,
        positions: usize,
        max_bytes: u64,
        gpu: Option<usize>,
    ) -> WitnessResult<Self> {
        let device = gpu.map_or(Ok(Device::Cpu), Device::new_cuda)?;
        let mut facts = facts::read(source)?;
        let files = WeightFiles::open(source)?;
        let names = files::names(&files, &facts)?;
        // A head that is stored is the model's, whatever the config says.
        facts.tied &= !names.values().any(|(name, _)| name == "lm_head.weight");
        let bytes = 4 * names.values().map(|(_, n)| n).sum::<u64>();
        if bytes > WHOLE_BYTES.min(max_bytes) {
            match Self::by_layer(source, facts.clone(), max_bytes, device.clone()) {
                Err(Absence::Unknown(_)) if bytes <= max_bytes => {}
                found => return found,
            }
        }
        let mut tensors = files::tensors(&files, &facts, &device, &|_| true)?;
        let embedding = "model.embed_tokens.weight";
        let head = tensors.get("lm_head.weight").or_else(|| tensors.get(embedding)).cloned();
        let Some(head) = head else { return unknown("its file has no embedding") };
        let window = facts.window.filter(|window| *window < positions);
        let (name, network) = match network(&facts, &mut tensors, &head, positions) {
            Ok(found) => found,
            Err(Absence::Unknown(_)) => return Self::by_layer(source, facts, max_bytes, device),
            Err(failed) => return Err(failed),
        };
        let computation = Computation::Whole(Whole { network, head, window }.into());
        Ok(Self { computation, name: format!("candle's {name}"), bytes })
    }

    fn by_layer(
        source: &ModelSource,
        facts: Facts,
        max_bytes: u64,
        device: Device,
    ) -> WitnessResult<Self> {
        let files = WeightFiles::open(source)?;
        let bytes = LayerWitness::bytes(&files, &facts)?;
        if bytes > max_bytes {
            return unknown(format!(
                "its largest layer takes {} MiB in f32, more than the {} MiB of \
                 qualification.witness_memory_mib",
                bytes >> 20,
                max_bytes >> 20
            ));
        }
        let computation = Computation::ByLayer(LayerWitness::new(files, facts, device)?.into());
        Ok(Self { computation, name: "candle layer by layer".into(), bytes })
    }

    /// Computes the text in order and passes on each wanted position whose logits the model gives,
    /// with the logits that predict the next token.
    pub fn logits(&mut self, tokens: &[u32], rows: WantedRows<'_>) -> crate::Result<()> {
        match &mut self.computation {
            Computation::Whole(whole) => whole.logits(tokens, rows),
            Computation::ByLayer(layers) => Ok(layers.logits(tokens, rows)?),
        }
    }
}

/// The positions whose logits are wanted, and what receives them.
pub struct WantedRows<'a> {
    pub wanted: &'a dyn Fn(usize) -> bool,
    pub row: &'a mut dyn FnMut(usize, &[f32]),
}

impl Whole {
    fn logits(&mut self, tokens: &[u32], mut rows: WantedRows<'_>) -> crate::Result<()> {
        let mut from = 0;
        while from < tokens.len() {
            let count = self.chunk(from, tokens.len());
            let ids = Tensor::new(&tokens[from..from + count], self.head.device())?.unsqueeze(0)?;
            let last = from + count - 1;
            let logits = match &mut self.network {
                Network::Qwen2(model) => {
                    let states = model.forward(&ids, from, None)?;
                    head_rows(&self.head, &states, from, &mut rows)?;
                    None
                }
                Network::Qwen3(model) => {
                    let states = model.forward(&ids, from)?;
                    head_rows(&self.head, &states, from, &mut rows)?;
                    None
                }
                Network::Llama(model, cache) => Some(model.forward(&ids, from, cache)?),
                Network::Mistral(model) => Some(model.forward(&ids, from)?),
                Network::Gemma2(model) => Some(model.forward(&ids, from)?),
                Network::Gemma3(model) => Some(model.forward(&ids, from)?),
            };
            if let Some(logits) = logits.filter(|_| (rows.wanted)(last)) {
                (rows.row)(last, &logits.flatten_all()?.to_vec1::<f32>()?);
            }
            from += count;
        }
        Ok(())
    }

    /// Tokens of the next pass. candle masks a window within one pass only; its Gemma 3 keeps it
    /// between passes of one token.
    fn chunk(&self, from: usize, total: usize) -> usize {
        let most = match (&self.network, self.window) {
            (Network::Qwen2(_), Some(_)) => total,
            (Network::Qwen2(_) | Network::Qwen3(_), _) => CHUNK,
            (Network::Gemma3(_), Some(window)) if from + SHORT_CHUNK > window => 1,
            _ => SHORT_CHUNK,
        };
        most.min(total - from)
    }
}

fn network(
    facts: &Facts,
    tensors: &mut HashMap<String, Tensor>,
    head: &Tensor,
    positions: usize,
) -> WitnessResult<(&'static str, Network)> {
    let own_heads = facts.hidden == facts.heads * facts.head_dim;
    let biased = |part: &str| tensors.keys().any(|name| name.ends_with(part));
    if biased("mlp.gate_proj.bias") || biased("mlp.up_proj.bias") || biased("mlp.down_proj.bias") {
        return unknown("candle's models have no biases in the MLP");
    }
    let output_bias = biased("o_proj.bias");
    let any_bias = output_bias || biased("q_proj.bias");
    if output_bias && !matches!(facts.family, Family::Qwen3 | Family::Gemma2 | Family::Gemma3) {
        return unknown("candle's model has no bias after the attention");
    }
    let plain = facts.rotation == Rotation::Plain;
    if facts.family == Family::Llama && own_heads && plain || any_bias {
        add_zero_biases(tensors, facts, output_bias, head.device())?;
    }
    let device = head.device();
    let builder = || VarBuilder::from_tensors(tensors.clone(), DType::F32, device);
    Ok(match facts.family {
        Family::Qwen3 if plain && facts.window.is_none() => {
            let model = qwen3::Model::new(&facts.qwen3(positions, any_bias), builder())?;
            ("qwen3", Network::Qwen3(model))
        }
        Family::Qwen2 | Family::Llama if plain && own_heads => {
            let model = qwen2::Model::new(&facts.qwen2(positions), builder())?;
            ("qwen2", Network::Qwen2(model))
        }
        Family::Llama if plain && !any_bias && facts.within_window(positions) => {
            tensors.entry("lm_head.weight".into()).or_insert_with(|| head.clone());
            let tensors = VarBuilder::from_tensors(tensors.clone(), DType::F32, device);
            let model = mistral::Model::new(&facts.mistral(positions), tensors)?;
            ("mistral", Network::Mistral(Box::new(model)))
        }
        Family::Llama if own_heads && !any_bias && facts.window.is_none() => {
            let Some(config) = facts.llama(positions) else {
                return unknown("candle has no model with its RoPE scaling");
            };
            let cache = llama::Cache::new(true, DType::F32, &config, device)?;
            let model = llama::Llama::load(builder(), &config)?;
            ("llama", Network::Llama(Box::new(model), Box::new(cache)))
        }
        Family::Gemma2 if plain && facts.within_window(positions) => {
            let model = gemma2::Model::new(false, &facts.gemma2(positions, any_bias), builder())?;
            ("gemma2", Network::Gemma2(Box::new(model)))
        }
        Family::Gemma3 if plain => {
            let model = gemma3::Model::new(false, &facts.gemma3(positions, any_bias), builder())?;
            ("gemma3", Network::Gemma3(Box::new(model)))
        }
        _ => return unknown("candle's model of this family lacks its RoPE scaling or window"),
    })
}

/// Adds the biases that candle's model asks for and the file lacks.
fn add_zero_biases(
    tensors: &mut HashMap<String, Tensor>,
    facts: &Facts,
    output: bool,
    device: &Device,
) -> candle_core::Result<()> {
    for layer in 0..facts.layers {
        for (part, rows) in [
            ("q_proj", facts.heads * facts.head_dim),
            ("k_proj", facts.kv_heads * facts.head_dim),
            ("v_proj", facts.kv_heads * facts.head_dim),
            ("o_proj", facts.hidden),
        ] {
            let name = format!("model.layers.{layer}.self_attn.{part}.bias");
            let asked = output || part != "o_proj" || facts.all_biases();
            if asked && !tensors.contains_key(&name) {
                tensors.insert(name, Tensor::zeros(rows, DType::F32, device)?);
            }
        }
    }
    Ok(())
}

impl Facts {
    /// Whether candle's model has a bias after the attention where it has others.
    fn all_biases(&self) -> bool {
        matches!(self.family, Family::Qwen3 | Family::Gemma2 | Family::Gemma3)
    }

    fn within_window(&self, positions: usize) -> bool {
        self.window.is_none_or(|window| positions <= window)
    }

    fn qwen2(&self, positions: usize) -> qwen2::Config {
        qwen2::Config {
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            max_position_embeddings: positions,
            // candle's window does not count the query's own token.
            sliding_window: self.window.map_or(usize::MAX / 2, |window| window - 1),
            max_window_layers: 0,
            tie_word_embeddings: false,
            rope_theta: self.theta,
            rms_norm_eps: self.eps,
            use_sliding_window: self.window.is_some(),
            hidden_act: Activation::Silu,
        }
    }

    fn qwen3(&self, positions: usize, attention_bias: bool) -> qwen3::Config {
        qwen3::Config {
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            head_dim: self.head_dim,
            attention_bias,
            num_key_value_heads: self.kv_heads,
            max_position_embeddings: positions,
            sliding_window: None,
            max_window_layers: 0,
            tie_word_embeddings: false,
            rope_theta: self.theta,
            rms_norm_eps: self.eps,
            use_sliding_window: false,
            hidden_act: Activation::Silu,
        }
    }

    fn mistral(&self, positions: usize) -> mistral::Config {
        mistral::Config {
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            head_dim: Some(self.head_dim),
            num_key_value_heads: self.kv_heads,
            hidden_act: Activation::Silu,
            max_position_embeddings: positions,
            rms_norm_eps: self.eps,
            rope_theta: self.theta,
            sliding_window: None,
            use_flash_attn: false,
        }
    }

    fn llama(&self, positions: usize) -> Option<llama::Config> {
        let Rotation::Llama3 { factor, low, high, original } = self.rotation else { return None };
        Some(llama::Config {
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            vocab_size: self.vocab,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            use_flash_attn: false,
            rms_norm_eps: self.eps,
            rope_theta: self.theta as f32,
            bos_token_id: None,
            eos_token_id: None,
            rope_scaling: Some(llama::Llama3RopeConfig {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
                rope_type: llama::Llama3RopeType::Llama3,
            }),
            max_position_embeddings: positions,
            tie_word_embeddings: self.tied,
        })
    }

    fn gemma2(&self, positions: usize, attention_bias: bool) -> gemma2::Config {
        gemma2::Config {
            attention_bias,
            head_dim: self.head_dim,
            hidden_activation: Activation::GeluPytorchTanh,
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            num_attention_heads: self.heads,
            num_hidden_layers: self.layers,
            num_key_value_heads: self.kv_heads,
            rms_norm_eps: self.eps,
            rope_theta: self.theta,
            vocab_size: self.vocab,
            final_logit_softcapping: self.logits_softcap,
            attn_logit_softcapping: self.attention_softcap,
            query_pre_attn_scalar: self.head_dim,
            sliding_window: None,
            max_position_embeddings: positions,
        }
    }

    fn gemma3(&self, positions: usize, attention_bias: bool) -> gemma3::Config {
        gemma3::Config {
            attention_bias,
            head_dim: self.head_dim,
            hidden_activation: Activation::GeluPytorchTanh,
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            num_attention_heads: self.heads,
            num_hidden_layers: self.layers,
            num_key_value_heads: self.kv_heads,
            rms_norm_eps: self.eps,
            rope_theta: self.theta,
            rope_local_base_freq: self.local_theta,
            vocab_size: self.vocab,
            final_logit_softcapping: self.logits_softcap,
            attn_logit_softcapping: self.attention_softcap,
            query_pre_attn_scalar: self.head_dim,
            sliding_window: self.window.unwrap_or(positions),
            sliding_window_pattern: self.pattern,
            max_position_embeddings: positions,
        }
    }
}

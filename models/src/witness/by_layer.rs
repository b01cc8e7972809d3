//! The witness of a model that is too large for memory in f32, or that candle's models lack a part
//! of: each layer is read, computed over the whole text at its true size and given up again, and
//! the states are carried to the next one.
//!
//! candle's models hold all their layers at once and neither take nor give states, so the layers
//! are written here with candle's tensors and ops. They share nothing with the serving path, and
//! tests compare them with transformers' logits as they do candle's models.

use super::absence::{WitnessResult, unknown};
use super::facts::{Facts, Family, Rotation};
use super::files::WeightFiles;
use super::{WantedRows, files};
use candle_core::{Device, Tensor};
use candle_nn::ops::{rms_norm, softmax_last_dim};
use candle_nn::rotary_emb::rope_slow;
use std::collections::HashMap;

/// Queries whose scores are computed together: of 32 heads over 32 768 keys they take 256 MiB.
const QUERIES: usize = 64;

/// Rows whose logits are computed together: 64 rows of a vocabulary of 262 144 take 64 MiB.
const HEAD_ROWS: usize = 64;

type Weights = HashMap<String, Tensor>;

pub(super) struct LayerWitness {
    files: WeightFiles,
    facts: Facts,
    device: Device,
}

impl LayerWitness {
    pub(super) fn new(files: WeightFiles, facts: Facts, device: Device) -> WitnessResult<Self> {
        if facts.rotation == Rotation::Other {
            return unknown("the layers of the witness lack its RoPE scaling");
        }
        Ok(Self { files, facts, device })
    }

    /// Most bytes in memory at a time: the largest of the embedding, a layer and the output head
    /// in f32, which is there twice while it is brought into Hugging Face's layout.
    pub(super) fn bytes(files: &WeightFiles, facts: &Facts) -> WitnessResult<u64> {
        let mut parts: HashMap<String, u64> = HashMap::new();
        for (name, values) in files::names(files, facts)?.into_values() {
            *parts.entry(layer_of(&name).unwrap_or(&name).to_owned()).or_default() += values;
        }
        Ok(8 * parts.into_values().max().unwrap_or(0))
    }

    /// Computes the text and passes on each wanted position with the logits that predict the next
    /// token.
    pub(super) fn logits(&self, tokens: &[u32], rows: WantedRows<'_>) -> WitnessResult<()> {
        let facts = &self.facts;
        let ids = Tensor::new(tokens, &self.device)?;
        let mut states = self.whole("model.embed_tokens.weight")?.index_select(&ids, 0)?;
        if facts.family.is_gemma() {
            states = (states * (facts.hidden as f64).sqrt())?;
        }
        for layer in 0..facts.layers {
            let prefix = format!("model.layers.{layer}.");
            let weights = files::tensors(&self.files, facts, &self.device, &|name| {
                name.starts_with(&prefix)
            })?;
            let block = Block { facts, weights, prefix, layer };
            states = block.forward(&states)?;
        }
        let states = facts.norm(&states, &self.whole("model.norm.weight")?)?;
        let head = if facts.tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
        let head = self.whole(head)?;
        let softcap = facts.logits_softcap;
        let WantedRows { wanted, row } = rows;
        let mut capped = |position: usize, logits: &[f32]| match softcap {
            None => row(position, logits),
            Some(cap) => {
                let cap = cap as f32;
                let capped: Vec<f32> = logits.iter().map(|x| (x / cap).tanh() * cap).collect();
                row(position, &capped);
            }
        };
        let mut rows = WantedRows { wanted, row: &mut capped };
        head_rows(&head, &states.unsqueeze(0)?, 0, &mut rows)?;
        Ok(())
    }

    fn whole(&self, name: &str) -> WitnessResult<Tensor> {
        let found = files::tensors(&self.files, &self.facts, &self.device, &|own| own == name)?
            .remove(name);
        found.map_or_else(|| unknown(format!("its file has no {name}")), Ok)
    }
}

/// The number of the layer to which a tensor belongs.
fn layer_of(name: &str) -> Option<&str> {
    name.strip_prefix("model.layers.")?.split('.').next()
}

impl Facts {
    /// RMSNorm over the last dimension. Gemma's weights are what is added to one.
    fn norm(&self, states: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
        let weight = if self.family.is_gemma() { (weight + 1.0)? } else { weight.clone() };
        rms_norm(&states.contiguous()?, &weight, self.eps as f32)
    }

    /// Tokens that a query of this layer sees, if it has a window.
    fn window_of(&self, layer: usize) -> Option<usize> {
        let windowed = !self.family.is_gemma() || !(layer + 1).is_multiple_of(self.pattern);
        self.window.filter(|_| windowed)
    }

    /// Cosines and sines `[positions, head_dim / 2]` of the rotation of a layer.
    fn angles(
        &self,
        layer: usize,
        positions: usize,
        device: &Device,
    ) -> candle_core::Result<[Tensor; 2]> {
        let is_local = self.family == Family::Gemma3 && self.window_of(layer).is_some();
        let theta = if is_local { self.local_theta } else { self.theta };
        let half = self.head_dim / 2;
        let frequency = |pair: usize| {
            self.rotation.scaled(theta.powf(-((2 * pair) as f64) / self.head_dim as f64))
        };
        let angle = |at: usize| (at / half) as f64 * frequency(at % half);
        let table = |of: fn(f64) -> f64| {
            let values: Vec<f32> = (0..positions * half).map(|at| of(angle(at)) as f32).collect();
            Tensor::from_vec(values, (positions, half), device)
        };
        Ok([table(f64::cos)?, table(f64::sin)?])
    }
}

impl Rotation {
    /// The frequency of a pair of dimensions as the model's scaling changes it. Llama 3 slows those
    /// down whose wave is longer than a part of the original context, smoothly between two lengths.
    fn scaled(self, frequency: f64) -> f64 {
        let Self::Llama3 { factor, low, high, original } = self else { return frequency };
        let [factor, low, high] = [factor, low, high].map(f64::from);
        let turns = original as f64 * frequency / std::f64::consts::TAU;
        let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        frequency * (kept + (1.0 - kept) / factor)
    }
}

/// A layer with its weights.
struct Block<'a> {
    facts: &'a Facts,
    weights: Weights,
    prefix: String,
    layer: usize,
}

impl Block<'_> {
    fn forward(&self, states: &Tensor) -> WitnessResult<Tensor> {
        let is_gemma = self.facts.family.is_gemma();
        let (before_mlp, after) = if is_gemma {
            (
                "pre_feedforward_layernorm",
                ["post_attention_layernorm", "post_feedforward_layernorm"],
            )
        } else {
            ("post_attention_layernorm", [""; 2])
        };
        let mut attended = self.attention(&self.norm(states, "input_layernorm")?)?;
        if is_gemma {
            attended = self.norm(&attended, after[0])?;
        }
        let states = (states + attended)?;
        let mut computed = self.mlp(&self.norm(&states, before_mlp)?)?;
        if is_gemma {
            computed = self.norm(&computed, after[1])?;
        }
        Ok((states + computed)?)
    }

    fn weight(&self, name: &str) -> WitnessResult<&Tensor> {
        let name = format!("{}{name}", self.prefix);
        self.weights.get(&name).map_or_else(|| unknown(format!("its file has no {name}")), Ok)
    }

    fn norm(&self, states: &Tensor, name: &str) -> WitnessResult<Tensor> {
        Ok(self.facts.norm(states, self.weight(&format!("{name}.weight"))?)?)
    }

    /// `[positions, out]` of `[positions, in]`.
    fn linear(&self, states: &Tensor, name: &str) -> WitnessResult<Tensor> {
        let product = states.matmul(&self.weight(&format!("{name}.weight"))?.t()?)?;
        Ok(match self.weights.get(&format!("{}{name}.bias", self.prefix)) {
            Some(bias) => product.broadcast_add(bias)?,
            None => product,
        })
    }

    fn mlp(&self, states: &Tensor) -> WitnessResult<Tensor> {
        let gate = self.linear(states, "mlp.gate_proj")?;
        let gate = if self.facts.family.is_gemma() { gate.gelu()? } else { gate.silu()? };
        self.linear(&(gate * self.linear(states, "mlp.up_proj")?)?, "mlp.down_proj")
    }

    /// One head after the other lies behind the first dimension: `[heads, positions, head_dim]`.
    fn heads(&self, states: &Tensor, part: &str, count: usize) -> WitnessResult<Tensor> {
        let (positions, dim) = (states.dim(0)?, self.facts.head_dim);
        let mut all = self.linear(states, &format!("self_attn.{part}_proj"))?;
        all = all.reshape((positions, count, dim))?;
        let norm = format!("self_attn.{part}_norm");
        if self.weights.contains_key(&format!("{}{norm}.weight", self.prefix)) {
            all = self.norm(&all, &norm)?;
        }
        let all = all.transpose(0, 1)?.contiguous()?;
        if part == "v" {
            return Ok(all);
        }
        let [cos, sin] = self.facts.angles(self.layer, positions, states.device())?;
        Ok(rope_slow(&all.unsqueeze(0)?, &cos, &sin)?.squeeze(0)?)
    }

    fn attention(&self, states: &Tensor) -> WitnessResult<Tensor> {
        let facts = self.facts;
        let positions = states.dim(0)?;
        let queries = self.heads(states, "q", facts.heads)?;
        let keys = self.heads(states, "k", facts.kv_heads)?.transpose(1, 2)?;
        let values = self.heads(states, "v", facts.kv_heads)?;
        let group = facts.heads / facts.kv_heads;
        let mut rows = Vec::new();
        for from in (0..positions).step_by(QUERIES) {
            let (count, seen) = (QUERIES.min(positions - from), (from + QUERIES).min(positions));
            // The heads of a group follow each other and share the group's keys and values.
            let some = queries.narrow(1, from, count)?.contiguous()?;
            let some = some.reshape((facts.kv_heads, group * count, facts.head_dim))?;
            let keys = keys.narrow(2, 0, seen)?.contiguous()?;
            let mut scores = (some.matmul(&keys)? / (facts.head_dim as f64).sqrt())?;
            if let Some(cap) = facts.attention_softcap {
                scores = ((scores / cap)?.tanh()? * cap)?;
            }
            let mask = self.mask([from, count, seen], states.device())?.repeat((group, 1))?;
            let weights = softmax_last_dim(&scores.broadcast_add(&mask)?)?;
            let found = weights.matmul(&values.narrow(1, 0, seen)?.contiguous()?)?;
            let found = found.reshape((facts.heads, count, facts.head_dim))?.transpose(0, 1)?;
            rows.push(found.contiguous()?.flatten_from(1)?);
        }
        self.linear(&Tensor::cat(&rows, 0)?, "self_attn.o_proj")
    }

    /// `[count, seen]`: what is added to the scores of the queries from there on.
    fn mask(
        &self,
        [from, count, seen]: [usize; 3],
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let window = self.facts.window_of(self.layer).unwrap_or(usize::MAX);
        let at = |place: usize| {
            let (query, key) = (from + place / seen, place % seen);
            if key <= query && query - key < window { 0.0 } else { f32::NEG_INFINITY }
        };
        let values: Vec<f32> = (0..count * seen).map(at).collect();
        Tensor::from_vec(values, (count, seen), device)
    }
}

/// Multiplies states by the output head, and passes on the logits of the wanted ones; the first
/// stands at position `from`.
pub(super) fn head_rows(
    head: &Tensor,
    states: &Tensor,
    from: usize,
    rows: &mut WantedRows<'_>,
) -> candle_core::Result<()> {
    let (states, head) = (states.squeeze(0)?, head.t()?);
    let wanted: Vec<u32> =
        (0..states.dim(0)? as u32).filter(|index| (rows.wanted)(from + *index as usize)).collect();
    for indices in wanted.chunks(HEAD_ROWS) {
        let some = states.index_select(&Tensor::new(indices, states.device())?, 0)?;
        let logits = some.matmul(&head)?;
        for (row, index) in indices.iter().enumerate() {
            (rows.row)(from + *index as usize, &logits.get(row)?.to_vec1::<f32>()?);
        }
    }
    Ok(())
}

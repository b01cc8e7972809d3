//! A decoder's shape from a Hugging Face `config.json`, each key of which must be understood.

use crate::config::{RopeConfig, RopeScaling};
use crate::loader::damaged;
use crate::{Error, ModelConfig, Result};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;

/// Keys that say nothing about inference.
const IGNORED: [&str; 16] = [
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "is_llama_config",
    "pad_token_id",
    "pretraining_tp",
    "resid_pdrop",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "use_cache",
];

#[derive(Deserialize)]
pub struct HfConfig {
    pub model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: String,
    rms_norm_eps: f32,
    max_position_embeddings: usize,
    rope_theta: Option<f32>,
    rope_scaling: Option<RopeParameters>,
    rope_parameters: Option<RopeParameters>,
    #[serde(default)]
    rope_interleaved: bool,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    pub attention_bias: bool,
    #[serde(default)]
    pub mlp_bias: bool,
    pub sliding_window: Option<usize>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct RopeParameters {
    rope_type: Option<String>,
    /// The older name of `rope_type`.
    r#type: Option<String>,
    rope_theta: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<usize>,
}

impl HfConfig {
    pub fn parse(path: &Path, json: &[u8]) -> Result<Self> {
        let config: Self = serde_json::from_slice(json).map_err(|e| damaged(path, &e.to_string()))?;
        let unknown = config.rest.iter().filter(|(key, value)| !value.is_null() && !IGNORED.contains(&key.as_str()));
        let unknown: Vec<&str> = unknown.map(|(key, _)| key.as_str()).collect();
        if unknown.is_empty() {
            return Ok(config);
        }
        let unknown = unknown.join(", ");
        Err(Error::Unsupported(format!("{}: this build does not know the keys {unknown}", path.display())))
    }

    pub fn decoder(&self) -> Result<ModelConfig, String> {
        if self.hidden_act != "silu" || self.rope_interleaved {
            return Err("only `hidden_act` \"silu\" and `rope_interleaved` false are supported".into());
        }
        let heads = self.num_attention_heads;
        let head_dim = self.head_dim.or(self.hidden_size.checked_div(heads)).unwrap_or(0);
        let config = ModelConfig {
            architecture: self.model_type.clone(),
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads,
            kv_heads: self.num_key_value_heads.unwrap_or(heads),
            head_dim,
            rms_norm_eps: self.rms_norm_eps,
            rope: self.rope(head_dim)?,
            max_positions: self.max_position_embeddings,
            sliding_window: self.sliding_window,
            tied_embeddings: self.tie_word_embeddings,
        };
        config.check()?;
        Ok(config)
    }

    fn rope(&self, rotary_dim: usize) -> Result<RopeConfig, String> {
        let parameters = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let theta = self.rope_theta.or(parameters.and_then(|p| p.rope_theta)).unwrap_or(10_000.0);
        let scaling = parameters.map_or(Ok(RopeScaling::None), RopeParameters::scaling)?;
        Ok(RopeConfig { theta, rotary_dim, scaling })
    }
}

impl RopeParameters {
    fn scaling(&self) -> Result<RopeScaling, String> {
        let kind = self.rope_type.as_deref().or(self.r#type.as_deref());
        let need = |value: Option<f32>, name| value.ok_or(format!("the RoPE scaling lacks `{name}`"));
        match kind {
            None | Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: need(self.factor, "factor")? }),
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: need(self.factor, "factor")?,
                low_freq_factor: need(self.low_freq_factor, "low_freq_factor")?,
                high_freq_factor: need(self.high_freq_factor, "high_freq_factor")?,
                original_max_positions: self
                    .original_max_position_embeddings
                    .ok_or("the RoPE scaling lacks `original_max_position_embeddings`")?,
            }),
            Some(other) => Err(format!("RoPE scaling {other:?} is not supported")),
        }
    }
}

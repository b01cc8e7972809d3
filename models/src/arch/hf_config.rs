//! Reads a decoder's shape from a Hugging Face `config.json`, each key of which must be understood.

use super::hf_rope;
use crate::config::{MixtureConfig, RouterScoring, SharedConfig, Sliding};
use crate::loader::damaged;
use crate::{Error, ModelConfig, Result};
use cresset_kernels::activation::Activation;
use cresset_kernels::gpu::Kind;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Keys that say nothing about inference, one on each line.
const IGNORED: &str = include_str!("hf_ignored_keys.txt");

/// For each `model_type`, the values that transformers uses for keys that a config leaves out. Only
/// those are listed that differ from what this reader uses for all families.
const USUAL: &str = include_str!("hf_usual_values.json");

/// Switches that some families lack. Others carry them; they must then be off.
const OFF: [&str; 9] = [
    "add_cross_attention",
    "attention_bias",
    "conv_bias",
    "is_encoder_decoder",
    "lm_head_bias",
    "mlp_bias",
    "rope_interleaved",
    "use_bidirectional_attention",
    "use_mrope",
];

/// Keys that describe the towers of a model that reads more than text, and where their results
/// enter the text.
const TOWERS: [&str; 22] = [
    "audio_config",
    "audio_token_id",
    "boa_token_id",
    "boi_token_id",
    "boi_token_index",
    "eoa_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_seq_length",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "video_token_id",
    "vision_config",
    "vision_feature_layer",
    "vision_end_token_id",
    "vision_feature_select_strategy",
    "vision_start_token_id",
    "vision_token_id",
];

const TIED: &str = "tie_word_embeddings";

/// The settings of a file, taken out as an architecture asks for them; a key that is left at the
/// end is not understood.
pub(super) struct HfConfigKeys {
    path: PathBuf,
    values: Map<String, Value>,
}

impl HfConfigKeys {
    pub(super) fn parse(path: &Path, json: &[u8]) -> Result<Self> {
        let values = serde_json::from_slice(json).map_err(|e| damaged(path, &e.to_string()))?;
        Self { path: path.to_owned(), values }.of_text()
    }

    /// Keeps what concerns text. A model that reads more than text has the settings of its text
    /// model in an object of their own, and the whole has the others; in older configs one object
    /// has both.
    fn of_text(mut self) -> Result<Self> {
        let text = self.take::<Map<String, Value>>("text_config")?;
        if text.is_some() || self.values.contains_key("vision_config") {
            self.values.retain(|key, _| !TOWERS.contains(&key.as_str()));
        }
        let Some(text) = text else { return Ok(self) };
        let [whole, part] = [&self.values, &text].map(|values| values.get("quantization_config"));
        if whole.zip(part).is_some_and(|(whole, part)| whole != part) {
            return Err(self.bad("`text_config` contradicts its quantization_config"));
        }
        // The head is the whole's, whose setting holds for it. Its usual value may be another one
        // than the text model's, so that configs have both.
        let tied = self.values.remove(TIED).filter(|tied| !tied.is_null());
        self.values.extend(text);
        self.values.extend(tied.map(|tied| (TIED.to_owned(), tied)));
        Ok(self)
    }

    /// The method by which the weights are quantised, if they are.
    pub(super) fn quantisation(&self) -> Option<&str> {
        let config = self.values.get("quantization_config").filter(|value| !value.is_null())?;
        Some(config["quant_method"].as_str().unwrap_or("an unnamed method"))
    }

    /// Takes a key out; `None` if it is absent or null.
    pub(super) fn take<T: DeserializeOwned>(&mut self, key: &str) -> Result<Option<T>> {
        match self.values.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value)
                .map(Some)
                .map_err(|e| self.bad(&format!("{key}: {e}"))),
        }
    }

    pub(super) fn required<T: DeserializeOwned>(&mut self, key: &str) -> Result<T> {
        self.take(key)?.ok_or_else(|| self.bad(&format!("{key} is missing")))
    }

    /// Takes a key out that may be null and not absent.
    pub(super) fn nullable<T: DeserializeOwned>(&mut self, key: &str) -> Result<Option<T>> {
        match self.values.get(key) {
            Some(_) => self.take(key),
            None => self.required(key).map(Some),
        }
    }

    pub(super) fn flag(&mut self, key: &str) -> Result<bool> {
        Ok(self.take(key)?.unwrap_or(false))
    }

    /// Takes a key out that may have no other value than `only`.
    pub(super) fn only(&mut self, key: &str, only: impl Into<Value>) -> Result<()> {
        let (found, only) = (self.take::<Value>(key)?, only.into());
        match found.filter(|value| *value != only) {
            None => Ok(()),
            Some(other) => {
                Err(self.unsupported(&format!("`{key}` is {other}, where {only} is supported")))
            }
        }
    }

    /// Takes a key out of the object that `key` is, if it is one.
    pub(super) fn take_inside<T: DeserializeOwned>(
        &mut self,
        key: &str,
        inner: &str,
    ) -> Result<Option<T>> {
        let Some(Value::Object(values)) = self.values.get_mut(key) else { return Ok(None) };
        let Some(value) = values.remove(inner) else { return Ok(None) };
        serde_json::from_value(value).map_err(|e| self.bad(&format!("{inner}: {e}")))
    }

    /// Leaves out the sections of a rotation for the axes of images, along which the positions of
    /// text are the same.
    pub(super) fn leave_out_sections(&mut self) -> Result<()> {
        for key in ["rope_parameters", "rope_scaling"] {
            self.take_inside::<Vec<usize>>(key, "mrope_section")?;
            self.take_inside::<bool>(key, "mrope_interleaved")?;
            // The older word for a rotation that has nothing but sections.
            if let Some(Value::Object(values)) = self.values.get_mut(key) {
                values.retain(|name, value| name != "type" || *value != "mrope");
            }
        }
        Ok(())
    }

    /// Takes an object out, whose own keys must be understood too.
    pub(super) fn object(&mut self, key: &str) -> Result<Option<Self>> {
        Ok(self.take(key)?.map(|values| Self { path: self.path.clone(), values }))
    }

    /// The same of an object that must be there.
    pub(super) fn required_object(&mut self, key: &str) -> Result<Self> {
        self.object(key)?.ok_or_else(|| self.bad(&format!("{key} is missing")))
    }

    pub(super) fn bad(&self, what: &str) -> Error {
        damaged(&self.path, what)
    }

    pub(super) fn unsupported(&self, what: &str) -> Error {
        Error::Unsupported(format!("{}: {what}", self.path.display()))
    }

    /// Reads what every decoder has.
    pub(super) fn decoder(&mut self, tied_embeddings: bool) -> Result<ModelConfig> {
        self.decoder_with(tied_embeddings, 1.0)
    }

    /// Reads the same of a decoder that rotates a part of each head.
    pub(super) fn decoder_with(&mut self, tied_embeddings: bool, part: f32) -> Result<ModelConfig> {
        let max_positions = self.required("max_position_embeddings")?;
        let (hidden_size, heads) =
            (self.required("hidden_size")?, self.required("num_attention_heads")?);
        let head_dim =
            self.take("head_dim")?.or(usize::checked_div(hidden_size, heads)).unwrap_or(0);
        let (rope, max_positions) = hf_rope::shared(self, head_dim, part, max_positions)?;
        let config = ModelConfig {
            vocab_size: self.required("vocab_size")?,
            hidden_size,
            intermediate_size: self.required("intermediate_size")?,
            layers: self.required("num_hidden_layers")?,
            heads,
            kv_heads: self.take("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            rms_norm_eps: self.take("rms_norm_eps")?.unwrap_or(1e-6),
            rope,
            max_positions,
            sliding: None,
            recurrent: None,
            mixture: None,
            shared_kv_layers: 0,
            latent: None,
            query_growth: None,
            unrotated: Vec::new(),
            attention_scale: 1.0 / (head_dim as f32).sqrt(),
            kv_kind: Kind::F32,
            attention_softcap: None,
            logits_softcap: None,
            embedding_scale: 1.0,
            logits_scale: 1.0,
            tied_embeddings: self.take(TIED)?.unwrap_or(tied_embeddings),
        };
        // The sizes are checked before anything is allocated by them.
        config.check().map_err(|what| self.bad(&what))?;
        Ok(config)
    }

    /// Gives the keys that the file leaves out the values that its family has for them. A key that
    /// is null keeps that: it may say that there is no such thing.
    pub(super) fn fill_in(&mut self, kind: &str) {
        let mut families: BTreeMap<String, Map<String, Value>> =
            serde_json::from_str(USUAL).expect("invariant: the embedded values are valid");
        for (key, value) in families.remove(kind).unwrap_or_default() {
            self.values.entry(key).or_insert(value);
        }
    }

    /// Gives a key a value, unless it has one.
    pub(super) fn default(&mut self, key: &str, value: impl Into<Value>) {
        let given = self.values.get(key).is_some_and(|value| !value.is_null());
        if !given {
            self.values.insert(key.to_owned(), value.into());
        }
    }

    /// Takes out a key that repeats another, and refuses another value.
    pub(super) fn take_repeated(&mut self, key: &str, of: &str) -> Result<()> {
        let Some(value) = self.take::<Value>(key)? else { return Ok(()) };
        if self.values.get(of).is_some_and(|other| *other == value) {
            return Ok(());
        }
        Err(self.bad(&format!("`{key}` differs from `{of}`")))
    }

    /// The part of each head that is rotated: a setting of its own, or one of the rotation.
    pub(super) fn rotated_part(&mut self, usual: f32) -> Result<f32> {
        const KEY: &str = "partial_rotary_factor";
        let own = self.take(KEY)?;
        let newer = self.take_inside("rope_parameters", KEY)?;
        let older = self.take_inside("rope_scaling", KEY)?;
        let part: f32 = newer.or(older).or(own).unwrap_or(usual);
        if part > 0.0 && part <= 1.0 {
            return Ok(part);
        }
        Err(self.bad("`partial_rotary_factor` is not a part of a head"))
    }

    /// Which layers are recurrent: those to which `layer_types` gives one of these `kinds`, or else
    /// `by_default`. The others have attention.
    pub(super) fn recurrent_layers(
        &mut self,
        layers: usize,
        kinds: &[&str],
        by_default: impl Fn(usize) -> bool,
    ) -> Result<Vec<bool>> {
        let Some(types) = self.take::<Vec<String>>("layer_types")? else {
            return Ok((0..layers).map(by_default).collect());
        };
        let is_recurrent = |kind: &String| match kind.as_str() {
            "full_attention" | "attention" => Ok(false),
            kind if kinds.contains(&kind) => Ok(true),
            other => Err(self.unsupported(&format!("the layer type {other:?} is not supported"))),
        };
        types.iter().map(is_recurrent).collect()
    }

    /// Reads the settings of experts of a width, in all layers.
    pub(super) fn mixture(&mut self, width: usize, layers: usize) -> Result<MixtureConfig> {
        let mut experts = None;
        for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
            experts = experts.or(self.take(key)?);
        }
        Ok(MixtureConfig {
            experts: experts.ok_or_else(|| self.bad("num_experts is missing"))?,
            chosen: self.required("num_experts_per_tok")?,
            intermediate_size: width,
            scoring: RouterScoring::Softmax,
            normalise: true,
            scale: 1.0,
            shared: None,
            layers: vec![true; layers],
        })
    }

    /// The number of groups of experts, and the number of groups from which experts are chosen.
    pub(super) fn expert_groups(&mut self) -> Result<[usize; 2]> {
        Ok([self.take("n_group")?.unwrap_or(1), self.take("topk_group")?.unwrap_or(1)])
    }

    /// Reads the settings of experts behind the first layers, beside one that computes every token.
    pub(super) fn later_mixture(
        &mut self,
        config: &ModelConfig,
        scoring: RouterScoring,
    ) -> Result<MixtureConfig> {
        let width: usize = self.required("moe_intermediate_size")?;
        let dense = self.take("first_k_dense_replace")?.unwrap_or(1);
        let shared: usize = self.take("n_shared_experts")?.unwrap_or(1);
        Ok(MixtureConfig {
            scoring,
            normalise: self.take("norm_topk_prob")?.unwrap_or(true),
            scale: self.take("routed_scaling_factor")?.unwrap_or(1.0),
            shared: (shared > 0)
                .then_some(SharedConfig { width: shared.saturating_mul(width), gated: false }),
            layers: (0..config.layers).map(|layer| layer >= dense).collect(),
            ..self.mixture(width, config.layers)?
        })
    }

    pub(super) fn activation(&mut self, key: &str, usual: Activation) -> Result<Activation> {
        match self.take::<String>(key)?.as_deref() {
            None => Ok(usual),
            Some("silu" | "swish") => Ok(Activation::Silu),
            Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
            Some(other) => Err(self.unsupported(&format!("`{key}` {other:?} is not supported"))),
        }
    }

    /// Takes `sliding_window` out; null means none.
    pub(super) fn window(&mut self, usual: usize) -> Result<Option<usize>> {
        if self.values.contains_key("sliding_window") {
            self.take("sliding_window")
        } else {
            Ok(Some(usual))
        }
    }

    /// The window, if `use_sliding_window` turns it on.
    pub(super) fn switched_window(&mut self) -> Result<Option<usize>> {
        let window = self.take("sliding_window")?;
        Ok(if self.flag("use_sliding_window")? { window } else { None })
    }

    /// Which layers have a sliding window: those that `layer_types` names, or else `by_default`.
    pub(super) fn sliding(
        &mut self,
        config: &ModelConfig,
        window: Option<usize>,
        by_default: impl Fn(usize) -> bool,
    ) -> Result<Option<Sliding>> {
        let layers = match self.take::<Vec<String>>("layer_types")? {
            Some(types) => types.iter().map(|kind| self.is_sliding(kind)).collect::<Result<_>>()?,
            None if window.is_some() => (0..config.layers).map(by_default).collect(),
            None => Vec::new(),
        };
        if !layers.contains(&true) {
            return Ok(None);
        }
        let window = window.ok_or_else(|| {
            self.bad("`layer_types` asks for a `sliding_window`, which is missing")
        })?;
        Ok(Some(Sliding { window, layers, rope: None, heads: None }))
    }

    fn is_sliding(&self, kind: &str) -> Result<bool> {
        match kind {
            "sliding_attention" => Ok(true),
            "full_attention" => Ok(false),
            other => Err(self.unsupported(&format!("the layer type {other:?} is not supported"))),
        }
    }

    /// The keys that nothing asked for.
    pub(super) fn left(&self) -> Vec<&str> {
        let silent = |key: &str, value: &Value| {
            value.is_null()
                || IGNORED.lines().any(|ignored| ignored == key)
                || (OFF.contains(&key) && *value == Value::Bool(false))
        };
        let left = self.values.iter().filter(|(key, value)| !silent(key, value));
        left.map(|(key, _)| key.as_str()).collect()
    }

    /// Refuses keys that nothing asked for: they may change the computation.
    pub(super) fn finish(self) -> Result<()> {
        let unknown = self.left();
        if unknown.is_empty() {
            return Ok(());
        }
        Err(self.unsupported(&format!("this build does not know the keys {}", unknown.join(", "))))
    }
}

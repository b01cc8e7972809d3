//! The keys of a Hugging Face `config.json`, each of which must be understood.

use crate::error::damaged;
use crate::{Error, Result};
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

pub(super) const TIED: &str = "tie_word_embeddings";

/// The settings of a file, taken out as an architecture asks for them; a key that is left at the
/// end is not understood.
pub(super) struct HfConfigKeys {
    path: PathBuf,
    pub(super) values: Map<String, Value>,
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

//! The shape of a model as candle's models need it, read from the files a second time and without
//! the code that serves.

use super::absence::{Absence, WitnessResult, unknown};
use super::lacking;
use crate::{FileLayout, ModelSource};
use candle_core::quantized::gguf_file::{Content, Value as GgufValue};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// Llama and Mistral.
    Llama,
    Qwen2,
    Qwen3,
    Gemma2,
    Gemma3,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rotation {
    Plain,
    Llama3 { factor: f32, low: f32, high: f32, original: usize },
    Other,
}

#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub family: Family,
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub eps: f64,
    pub theta: f64,
    /// Base of the rotation in layers with a window.
    pub local_theta: f64,
    pub rotation: Rotation,
    pub window: Option<usize>,
    /// Every layer of this number has no window.
    pub pattern: usize,
    pub attention_softcap: Option<f64>,
    pub logits_softcap: Option<f64>,
    pub tied: bool,
    /// Whether the rows of Q and K are permuted, and one was added to the weights of norms, as
    /// llama.cpp's converter does.
    pub permuted: bool,
    pub norms_plus_one: bool,
}

pub(super) fn read(source: &ModelSource) -> WitnessResult<Facts> {
    match source.layout() {
        FileLayout::Gguf(path) => {
            let (content, _) = open(path)?;
            if content
                .metadata
                .get("split.count")
                .is_some_and(|count| count.to_u16().unwrap_or(2) > 1)
            {
                return unknown("candle reads one GGUF file, and this model is split into several");
            }
            GgufFacts(&content).read()
        }
        FileLayout::HfFolder(folder) => {
            let config = std::fs::read(folder.join("config.json"))?;
            HfFacts(serde_json::from_slice(&config).unwrap_or_default()).read()
        }
    }
}

pub(super) fn open(path: &Path) -> WitnessResult<(Content, BufReader<File>)> {
    let mut reader = BufReader::new(File::open(path)?);
    let content = match Content::read(&mut reader) {
        Ok(content) => content,
        Err(error) => match lacking::tensors(path) {
            Ok(tensors) if !tensors.is_empty() => lacking::header(path).map_err(Absence::Failed)?,
            _ => return Err(error.into()),
        },
    };
    Ok((content, reader))
}

/// Ids that the files declare to end an answer.
pub fn declared_ends(source: &ModelSource) -> crate::Result<Vec<u32>> {
    let read = match source.layout() {
        FileLayout::Gguf(path) => ends_in_gguf(path),
        FileLayout::HfFolder(folder) => ends_in_folder(folder),
    };
    read.map_err(Into::into)
}

const ARCHITECTURE: &str = "general.architecture";

/// The scalars that shape the model: of a GGUF file's header the architecture and its values, of a
/// folder's `config.json` all, behind the model's type.
pub fn hyper_parameters(source: &ModelSource) -> crate::Result<BTreeMap<String, Value>> {
    let read = match source.layout() {
        FileLayout::Gguf(path) => scalars_in_gguf(path),
        FileLayout::HfFolder(folder) => scalars_in_config(folder),
    };
    read.map_err(Into::into)
}

fn scalars_in_config(folder: &Path) -> WitnessResult<BTreeMap<String, Value>> {
    let config: Value =
        serde_json::from_slice(&std::fs::read(folder.join("config.json"))?).unwrap_or_default();
    let kind = config["model_type"].as_str().unwrap_or_default();
    let scalar = |value: &Value| value.is_number() || value.is_boolean() || value.is_string();
    let all = config.as_object().into_iter().flatten().filter(|(_, value)| scalar(value));
    let named = all.map(|(key, value)| (format!("{kind}.{key}"), value.clone()));
    Ok(named.chain([(ARCHITECTURE.to_owned(), kind.into())]).collect())
}

fn scalars_in_gguf(path: &Path) -> WitnessResult<BTreeMap<String, Value>> {
    let (content, _) = open(path)?;
    let Some(GgufValue::String(architecture)) = content.metadata.get(ARCHITECTURE) else {
        return unknown(format!("its metadata has no {ARCHITECTURE}"));
    };
    let own = format!("{architecture}.");
    let ours =
        content.metadata.iter().filter(|(key, _)| *key == ARCHITECTURE || key.starts_with(&own));
    Ok(ours.filter_map(|(key, value)| Some((key.clone(), scalar(value)?))).collect())
}

/// `None` for an array.
fn scalar(value: &GgufValue) -> Option<Value> {
    Some(match value {
        GgufValue::F32(value) => f64::from(*value).into(),
        GgufValue::F64(value) => (*value).into(),
        GgufValue::Bool(value) => (*value).into(),
        GgufValue::String(text) => text.as_str().into(),
        GgufValue::I8(value) => (*value).into(),
        GgufValue::I16(value) => (*value).into(),
        GgufValue::I32(value) => (*value).into(),
        GgufValue::I64(value) => (*value).into(),
        GgufValue::Array(_) => return None,
        _ => value.to_u64().ok()?.into(),
    })
}

fn ends_in_gguf(path: &Path) -> WitnessResult<Vec<u32>> {
    let (content, _) = open(path)?;
    let keys = ["eos", "eot", "eom"].map(|end| format!("tokenizer.ggml.{end}_token_id"));
    let ids = keys.iter().filter_map(|key| content.metadata.get(key)?.to_u64().ok());
    Ok(ids.filter_map(|id| id.try_into().ok()).collect())
}

fn ends_in_folder(folder: &Path) -> WitnessResult<Vec<u32>> {
    let file = folder.join("generation_config.json");
    let file = if file.exists() { file } else { folder.join("config.json") };
    let config: Value = serde_json::from_slice(&std::fs::read(file)?).unwrap_or_default();
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let declared = &config["eos_token_id"];
    let several = declared.as_array().into_iter().flatten().filter_map(id);
    Ok(id(declared).into_iter().chain(several).collect())
}

fn family(name: &str) -> WitnessResult<Family> {
    Ok(match name {
        "llama" | "mistral" => Family::Llama,
        "qwen2" => Family::Qwen2,
        "qwen3" => Family::Qwen3,
        "gemma2" => Family::Gemma2,
        "gemma3" | "gemma3_text" => Family::Gemma3,
        other => return unknown(format!("candle has no model of the family {other:?}")),
    })
}

impl Family {
    pub(super) fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Every layer of this number has no window, unless the file says otherwise.
    fn pattern(self) -> usize {
        if self == Self::Gemma2 { 2 } else { 6 }
    }
}

struct GgufFacts<'a>(&'a Content);

impl GgufFacts<'_> {
    fn get(&self, key: &str) -> Option<&GgufValue> {
        let architecture = self.0.metadata.get("general.architecture")?.to_string().ok()?;
        self.0.metadata.get(&format!("{architecture}.{key}"))
    }

    fn size(&self, key: &str) -> Option<usize> {
        self.get(key)?.to_u64().ok().and_then(|value| usize::try_from(value).ok())
    }

    fn float(&self, key: &str) -> Option<f64> {
        self.get(key)?.to_f32().ok().map(f64::from)
    }

    fn needed(&self, key: &str) -> WitnessResult<usize> {
        self.size(key).map_or_else(|| unknown(format!("its metadata has no {key}")), Ok)
    }

    fn read(&self) -> WitnessResult<Facts> {
        let name = self.0.metadata.get("general.architecture");
        let family = family(name.and_then(|v| v.to_string().ok()).map_or("", String::as_str))?;
        let (hidden, heads) =
            (self.needed("embedding_length")?, self.needed("attention.head_count")?);
        if self.get("expert_count").is_some() {
            return unknown("the witness computes no mixture of experts");
        }
        let (layers, head_dim) = (
            self.needed("block_count")?,
            self.size("attention.key_length").unwrap_or(hidden / heads.max(1)),
        );
        // GGUF does not tell the scale of attention. Only these sizes have another than candle's.
        if (family == Family::Gemma2 && layers == 46) || (family == Family::Gemma3 && layers == 62)
        {
            return unknown("candle's Gemma has another attention scale than the 27B models");
        }
        let embedding = self.0.tensor_infos.get("token_embd.weight");
        let Some(vocab) = embedding.and_then(|info| info.shape.dims().first().copied()) else {
            return unknown("its file has no embedding");
        };
        let default_window = if family == Family::Gemma2 { Some(4096) } else { None };
        Ok(Facts {
            family,
            vocab,
            hidden,
            intermediate: self.needed("feed_forward_length")?,
            layers,
            heads,
            kv_heads: self.size("attention.head_count_kv").unwrap_or(heads),
            head_dim,
            eps: self.float("attention.layer_norm_rms_epsilon").unwrap_or(1e-6),
            theta: self.float("rope.freq_base").unwrap_or(10_000.0),
            local_theta: 10_000.0,
            rotation: self.rotation(head_dim),
            window: self.size("attention.sliding_window").or(default_window),
            pattern: self.pattern(family, layers)?,
            attention_softcap: self.float("attn_logit_softcapping"),
            logits_softcap: self.float("final_logit_softcapping"),
            tied: !self.0.tensor_infos.contains_key("output.weight"),
            permuted: family == Family::Llama,
            norms_plus_one: family.is_gemma(),
        })
    }

    fn rotation(&self, head_dim: usize) -> Rotation {
        let kind = self.get("rope.scaling.type").and_then(|v| v.to_string().ok());
        let scaled = kind.is_some_and(|kind| kind != "none")
            || ["rope.scaling.factor", "rope.scale_linear"].iter().any(|k| self.get(k).is_some());
        let partial = self.size("rope.dimension_count").is_some_and(|dim| dim != head_dim);
        let baked = self.0.tensor_infos.contains_key("rope_freqs.weight");
        if scaled || partial || baked { Rotation::Other } else { Rotation::Plain }
    }

    fn pattern(&self, family: Family, layers: usize) -> WitnessResult<usize> {
        match self.get("attention.sliding_window_pattern") {
            None => Ok(family.pattern()),
            Some(GgufValue::Array(flags)) => {
                let flags: Vec<bool> =
                    flags.iter().map(|flag| flag.to_bool().unwrap_or(false)).collect();
                pattern_of(&flags, layers)
            }
            Some(value) => Ok(value.to_u64().map_or(0, |n| n as usize).max(1)),
        }
    }
}

/// The number of the regular layers without a window, which is all that candle knows.
fn pattern_of(windowed: &[bool], layers: usize) -> WitnessResult<usize> {
    let fits =
        |p: &usize| windowed.iter().enumerate().all(|(layer, has)| *has == ((layer + 1) % p > 0));
    match (1..=layers + 1).find(fits) {
        Some(pattern) if windowed.len() == layers => Ok(pattern),
        _ => unknown("candle knows only windows in a regular pattern of layers"),
    }
}

struct HfFacts(Value);

impl HfFacts {
    fn size(&self, key: &str) -> Option<usize> {
        self.0[key].as_u64().and_then(|value| usize::try_from(value).ok())
    }

    fn needed(&self, key: &str) -> WitnessResult<usize> {
        self.size(key).map_or_else(|| unknown(format!("config.json has no {key}")), Ok)
    }

    /// The parameters of the rotation, where newer and where older configs have them.
    fn rope(&self, kind: &str) -> &Value {
        let newer = &self.0["rope_parameters"];
        [&newer[kind], newer].into_iter().find(|value| value.is_object()).unwrap_or(&Value::Null)
    }

    fn read(&self) -> WitnessResult<Facts> {
        if self.0["text_config"].is_object() {
            return unknown("the witness knows no checkpoint that reads more than text");
        }
        let family = family(self.0["model_type"].as_str().unwrap_or_default())?;
        let (hidden, heads) = (self.needed("hidden_size")?, self.needed("num_attention_heads")?);
        let head_dim = self.size("head_dim").unwrap_or(hidden / heads.max(1));
        if family.is_gemma() && self.size("query_pre_attn_scalar").is_some_and(|s| s != head_dim) {
            return unknown("candle's Gemma has another attention scale");
        }
        let activation = self.0["hidden_activation"].as_str().or(self.0["hidden_act"].as_str());
        let usual = if family.is_gemma() { "gelu_pytorch_tanh" } else { "silu" };
        if activation.is_some_and(|name| name != usual) {
            return unknown("this witness knows only the family's usual activation");
        }
        let theta = |own: &str, kind: &str, default: f64| {
            self.0[own].as_f64().or(self.rope(kind)["rope_theta"].as_f64()).unwrap_or(default)
        };
        let base = if family.is_gemma() { 1e6 } else { 1e4 };
        let layers = self.needed("num_hidden_layers")?;
        Ok(Facts {
            family,
            vocab: self.needed("vocab_size")?,
            hidden,
            intermediate: self.needed("intermediate_size")?,
            layers,
            heads,
            kv_heads: self.size("num_key_value_heads").unwrap_or(heads),
            head_dim,
            eps: self.0["rms_norm_eps"].as_f64().unwrap_or(1e-6),
            theta: theta("rope_theta", "full_attention", base),
            local_theta: theta("rope_local_base_freq", "sliding_attention", 1e4),
            rotation: self.rotation(),
            window: self.window(family)?,
            pattern: self.pattern(family, layers)?,
            attention_softcap: self.0["attn_logit_softcapping"].as_f64(),
            logits_softcap: self.0["final_logit_softcapping"].as_f64(),
            tied: self.0["tie_word_embeddings"].as_bool().unwrap_or(family.is_gemma()),
            permuted: false,
            norms_plus_one: false,
        })
    }

    fn rotation(&self) -> Rotation {
        let older = &self.0["rope_scaling"];
        let scaling = if older.is_object() { older } else { self.rope("full_attention") };
        let number = |key: &str| scaling[key].as_f64().map(|value| value as f32);
        let kind = scaling["rope_type"].as_str().or(scaling["type"].as_str());
        let original = scaling["original_max_position_embeddings"].as_u64();
        let parts = (
            number("factor"),
            number("low_freq_factor"),
            number("high_freq_factor"),
            original.and_then(|original| usize::try_from(original).ok()),
        );
        match (kind.unwrap_or("default"), parts) {
            ("default", _) => Rotation::Plain,
            ("llama3", (Some(factor), Some(low), Some(high), Some(original))) => {
                Rotation::Llama3 { factor, low, high, original }
            }
            _ => Rotation::Other,
        }
    }

    fn window(&self, family: Family) -> WitnessResult<Option<usize>> {
        let stated = self.size("sliding_window");
        match family {
            Family::Qwen2 | Family::Qwen3 => {
                if self.0["use_sliding_window"].as_bool().unwrap_or(false) {
                    return unknown("candle has no windows in some of Qwen's layers");
                }
                Ok(None)
            }
            Family::Gemma2 | Family::Gemma3 => Ok(Some(stated.unwrap_or(4096))),
            Family::Llama if self.0["model_type"] == "llama" => Ok(None),
            Family::Llama if self.0.get("sliding_window").is_none() => Ok(Some(4096)),
            Family::Llama => Ok(stated),
        }
    }

    fn pattern(&self, family: Family, layers: usize) -> WitnessResult<usize> {
        let Some(types) = self.0["layer_types"].as_array() else {
            return Ok(self.size("sliding_window_pattern").unwrap_or(family.pattern()).max(1));
        };
        let windowed: Vec<bool> = types.iter().map(|kind| *kind == "sliding_attention").collect();
        if family.is_gemma() { pattern_of(&windowed, layers) } else { Ok(1) }
    }
}

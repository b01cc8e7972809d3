//! Tiny quantised checkpoints as folders that a node can serve: those of the goldens, with the
//! tokenizer of the tests' tiny model, for which their vocabulary grows.

use super::{TinyLlama, vocab_size};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

const CASES: &str = include_str!("../../goldens/quantised.json");
const TENSORS: &[u8] = include_bytes!("../../goldens/quantised.safetensors");
/// The goldens' tokens, each as a character that the tokenizer never puts together with others.
const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&*+,-./:";
/// Positions of the folder, of which the goldens use forty.
const POSITIONS: usize = 2048;
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// What is known of such a folder.
pub struct GoldenFolder {
    pub config: Value,
    /// The goldens' tokens, as text.
    pub question: String,
    /// The logits behind them of the tokens that the goldens have, by their texts.
    pub logits: BTreeMap<String, f32>,
}

impl GoldenFolder {
    /// Writes the case of this name, with a chat template.
    pub fn write(name: &str, folder: &Path, template: &str) -> io::Result<Self> {
        TinyLlama::default().write_safetensors(folder)?;
        let mut words = json(folder, "tokenizer_config.json")?;
        words["chat_template"] = template.into();
        store(folder, "tokenizer_config.json", &words)?;
        let case = case_of(name)?;
        let mut config = case["config"].clone();
        config["vocab_size"] = vocab_size().into();
        config["max_position_embeddings"] = POSITIONS.into();
        store(folder, "config.json", &config)?;
        let all = SafeTensors::deserialize(TENSORS).map_err(io::Error::other)?;
        let prefix = format!("{name}:");
        let own = all.iter().filter_map(|(key, view)| Some((key.strip_prefix(&prefix)?, view)));
        let mut tensors: BTreeMap<&str, TensorView> = own.collect();
        let logits = tensors.remove("logits").ok_or(io::ErrorKind::NotFound)?;
        write_tensors(folder, tensors)?;
        let (letters, rows) = (LETTERS.chars(), logits.data().as_chunks().0);
        let last = rows[rows.len() - LETTERS.len()..].iter().map(|x| f32::from_le_bytes(*x));
        let tokens = case["tokens"].as_array().into_iter().flatten().filter_map(Value::as_u64);
        let question = tokens.filter_map(|token| LETTERS.chars().nth(token as usize)).collect();
        let logits = letters.map(String::from).zip(last).collect();
        Ok(Self { config, question, logits })
    }
}

fn case_of(name: &str) -> io::Result<Value> {
    let cases: Value = serde_json::from_str(CASES)?;
    let mut cases = cases["cases"].as_array().into_iter().flatten();
    let case = cases.find(|case| case["name"] == name);
    Ok(case.ok_or(io::ErrorKind::NotFound)?.clone())
}

fn json(folder: &Path, file: &str) -> io::Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(folder.join(file))?)?)
}

fn store(folder: &Path, file: &str, value: &Value) -> io::Result<()> {
    std::fs::write(folder.join(file), value.to_string())
}

/// Writes the tensors, of which the embedding and the head grow to the tokenizer's vocabulary.
fn write_tensors(folder: &Path, mut tensors: BTreeMap<&str, TensorView>) -> io::Result<()> {
    let vocabulary = json(folder, "tokenizer.json")?["model"]["vocab"].clone();
    let id = |letter: char| vocabulary[letter.to_string()].as_u64();
    let ids: Vec<usize> = LETTERS.chars().filter_map(id).map(|id| id as usize).collect();
    let found = [EMBEDDING, HEAD].map(|key| Some((key, tensors.remove(key)?)));
    let grown =
        found.into_iter().flatten().map(|(key, old)| (key, old.shape()[1], grow(&old, &ids)));
    let grown: Vec<(&str, usize, Vec<u8>)> = grown.collect();
    let mut whole: BTreeMap<&str, TensorView> = tensors;
    for (key, width, bytes) in &grown {
        let view = TensorView::new(Dtype::BF16, vec![vocab_size(), *width], bytes);
        whole.insert(key, view.map_err(io::Error::other)?);
    }
    let path = folder.join("model.safetensors");
    safetensors::serialize_to_file(whole, None, &path).map_err(io::Error::other)
}

/// The rows of letters, in bf16, at their ids; every other id has a quarter of one of them.
fn grow(old: &TensorView, ids: &[usize]) -> Vec<u8> {
    let rows: Vec<&[u8]> = old.data().chunks_exact(old.shape()[1] * 2).collect();
    let quarter = |value: &[u8; 2]| {
        let bits = u16::from_le_bytes(*value);
        let exponent = bits >> 7 & 0xff;
        (if exponent > 2 { bits - (2 << 7) } else { 0 }).to_le_bytes()
    };
    let row = |id: usize| match ids.iter().position(|own| *own == id) {
        Some(at) => rows[at].to_vec(),
        None => rows[id % rows.len()].as_chunks().0.iter().flat_map(quarter).collect(),
    };
    (0..vocab_size()).flat_map(row).collect()
}

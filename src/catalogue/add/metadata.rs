//! Reads from the files themselves what they say about a release.

use super::files::is_gguf_path;
use crate::{Error, Result, sampling_defaults};
use cresset_kernels::sampling::params::SamplingParams;
use cresset_models::arch;
use cresset_models::loader::gguf::{GgufFile, Value};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

pub(super) fn context_tokens(files: &[PathBuf]) -> Result<u32> {
    let found =
        if is_gguf_path(&files[0]) { gguf_context(&files[0])? } else { config_context(files) };
    let refuse = || Error::NotAModel {
        path: files[0].clone(),
        why: "it does not say its context length".into(),
    };
    found.and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0).ok_or_else(refuse)
}

fn gguf(path: &Path) -> Result<BTreeMap<String, Value>> {
    // The error names the file itself.
    Ok(GgufFile::open(path).map_err(|error| Error::Unreadable(error.to_string()))?.metadata)
}

pub(super) fn gguf_text(path: &Path, key: &str) -> Result<Option<String>> {
    Ok(gguf(path)?.remove(key).and_then(|value| match value {
        Value::String(text) if !text.is_empty() => Some(text),
        _ => None,
    }))
}

fn gguf_context(path: &Path) -> Result<Option<u64>> {
    let metadata = gguf(path)?;
    let Some(Value::String(architecture)) = metadata.get("general.architecture") else {
        return Ok(None);
    };
    Ok(match metadata.get(&format!("{architecture}.context_length")) {
        Some(Value::U32(n)) => Some(u64::from(*n)),
        Some(Value::U64(n)) => Some(*n),
        _ => None,
    })
}

fn config_context(files: &[PathBuf]) -> Option<u64> {
    let config = json(files, "config.json")?;
    // A model that reads more than text has the settings of its text model apart.
    let parts = [&config, &config["text_config"]];
    let said = parts.into_iter().find_map(|part| part["max_position_embeddings"].as_u64());
    said.or_else(|| usual_context(&config))
}

/// The context of a family whose configs leave out what it usually is.
fn usual_context(config: &serde_json::Value) -> Option<u64> {
    let spec = arch::from_hf(Path::new("config.json"), config.to_string().as_bytes()).ok()?;
    u64::try_from(spec.config.max_positions).ok()
}

/// The publisher's own sampling parameters, if the release carries them.
pub(super) fn generation_defaults(files: &[PathBuf]) -> SamplingParams {
    let mut params = SamplingParams::default();
    let Some(config) = json(files, "generation_config.json") else { return params };
    if config["do_sample"].as_bool() == Some(false) {
        return SamplingParams { temperature: 0.0, ..params };
    }
    for number in sampling_defaults::numbers() {
        if let Some(value) = config[number.name].as_f64() {
            number.set(&mut params, value);
        }
    }
    params
}

fn json(files: &[PathBuf], name: &str) -> Option<serde_json::Value> {
    let path = files.iter().find(|file| file.ends_with(name))?;
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

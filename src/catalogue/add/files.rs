//! The files of a release: which ones make a model, their digests, and how they get to their place.

use crate::catalogue::fetch::FetchProgress;
use crate::catalogue::folder::{ReleaseFolder, is_gguf, sha256};
use crate::catalogue::{Error, ReleaseFile, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// The files that a node reads in a folder in Hugging Face layout, beside the weights.
const HF_FILES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
];

/// Files in Hugging Face layout that a model cannot do without.
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];

/// Which kind of weights to take from a place that has both.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Preferred {
    /// For a folder on this machine, because a GGUF file was put there on purpose.
    Gguf,
    /// For a repository on the hub, whose own weights are preferred to a conversion beside them.
    Safetensors,
}

/// Chooses the files that make a model: one GGUF file, or Hugging Face layout with safetensors.
/// Errors say what is wrong with the place; if it has several GGUF files, `name_one` says how to
/// ask for one.
pub(super) fn choose(
    names: &[String],
    preferred: Preferred,
    name_one: &str,
) -> Result<Vec<String>, String> {
    let in_layout = |name: &&String| {
        HF_FILES.contains(&name.as_str()) || (is_safetensors(name) && !name.contains('/'))
    };
    let ggufs: Vec<String> = names.iter().filter(|name| is_gguf(name)).cloned().collect();
    let layout: Vec<String> = names.iter().filter(in_layout).cloned().collect();
    let has_weights = layout.iter().any(|name| is_safetensors(name));
    if has_weights && (ggufs.is_empty() || preferred == Preferred::Safetensors) {
        return complete(layout);
    }
    match ggufs.len() {
        0 => Err("it holds neither a .gguf file nor config.json with *.safetensors".into()),
        1 => Ok(ggufs),
        _ => Err(format!("it holds several .gguf files; {name_one}: {}", ggufs.join(", "))),
    }
}

fn complete(layout: Vec<String>) -> Result<Vec<String>, String> {
    match NEEDED.iter().find(|needed| layout.iter().all(|name| name != *needed)) {
        Some(missing) => {
            Err(format!("it has no {missing}, which a model needs beside its weights"))
        }
        None => Ok(layout),
    }
}

fn is_safetensors(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|ext| ext == "safetensors")
}

pub(super) fn is_gguf_path(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(is_gguf)
}

pub(super) fn digest(path: &Path, progress: &mut dyn FnMut(FetchProgress)) -> Result<ReleaseFile> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
    let bytes = path.metadata().map_err(Error::io("read", path))?.len();
    let mut done = 0;
    let sha256 = sha256(path, |n| {
        done += n;
        progress(FetchProgress { file: &name, done, total: bytes });
    })?;
    Ok(ReleaseFile { name, sha256, bytes })
}

/// Moves a downloaded blob to the incoming folder under the file's own name.
pub(super) fn named(folder: &ReleaseFolder, blob: &Path, file: &str) -> Result<PathBuf> {
    let base = file.rsplit('/').next().unwrap_or(file);
    let to = folder.incoming().join(base);
    fs::rename(blob, &to).map_err(Error::io("rename", blob))?;
    Ok(to)
}

pub(super) fn place(from: &Path, folder: &ReleaseFolder, name: &str) -> Result<()> {
    let to = folder.path().join(name);
    if to.exists() {
        fs::remove_file(&to).map_err(Error::io("remove", &to))?;
    }
    if fs::hard_link(from, &to).is_ok() {
        return Ok(());
    }
    let part = folder.path().join(format!(".{name}.part"));
    fs::copy(from, &part).map_err(Error::io("copy to", &part))?;
    fs::rename(&part, &to).map_err(Error::io("rename", &part))
}

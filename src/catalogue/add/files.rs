//! The files of a release: which ones make a model, their digests, and how they get to their place.

use crate::fetch::{FetchPhase, FetchProgress};
use crate::folder::{PART, ReleaseFolder, is_gguf, sha256};
use crate::{Error, ReleaseFile, Result};
use cresset_models::loader::gguf::ShardName;
use std::fs::{self, File};
use std::path::Path;

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

/// The config of an adapter, which has no `config.json` of its own.
const ADAPTER: &str = "adapter_config.json";

/// Which kind of weights to take from a place that has both.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Preferred {
    /// For a folder on this machine, because a GGUF file was put there on purpose.
    Gguf,
    /// For a repository on the hub, whose own weights are preferred to a conversion beside them.
    Safetensors,
}

/// Chooses the files that make a model: one GGUF file or its shards, or Hugging Face layout with
/// safetensors.
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
    let ggufs = ggufs_of(names);
    let layout: Vec<String> = names.iter().filter(in_layout).cloned().collect();
    if names.iter().any(|name| name == ADAPTER) && !names.iter().any(|name| name == NEEDED[0]) {
        return Err(format!(
            "it is a LoRA adapter ({ADAPTER}) and no whole model: merge it into its base model first"
        ));
    }
    let has_weights = layout.iter().any(|name| is_safetensors(name));
    if has_weights && (ggufs.is_empty() || preferred == Preferred::Safetensors) {
        return complete(layout);
    }
    match ggufs[..] {
        [] => Err("it holds neither a .gguf file nor config.json with *.safetensors".into()),
        [one] => with_shards(one, names),
        _ => Err(format!("it holds several .gguf files; {name_one}: {}", listed(&ggufs))),
    }
}

/// The GGUF files, of a model in shards the first one that is there.
fn ggufs_of(names: &[String]) -> Vec<&String> {
    let follows = |shard: ShardName| {
        shard.all().take(shard.number - 1).any(|earlier| names.contains(&earlier))
    };
    let is_first = |name: &&String| is_gguf(name) && !ShardName::parse(name).is_some_and(follows);
    names.iter().filter(is_first).collect()
}

fn listed(names: &[&String]) -> String {
    names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ")
}

/// The names of all shards of the model to which a file belongs, or its own. All are among `names`.
pub(super) fn with_shards(name: &str, names: &[String]) -> Result<Vec<String>, String> {
    let Some(shard) = ShardName::parse(name) else { return Ok(vec![name.to_owned()]) };
    let all: Vec<String> = shard.all().collect();
    match all.iter().find(|name| !names.contains(name)) {
        None => Ok(all),
        Some(missing) => {
            let count = shard.count;
            Err(format!("its model is split into {count} files, of which {missing} is missing"))
        }
    }
}

/// Chooses the one GGUF file whose name ends with a quantisation, such as `Q4_K_M`, or its shards.
pub(super) fn choose_quantised(names: &[String], tag: &str) -> Result<Vec<String>, String> {
    let ggufs = ggufs_of(names);
    let ends_with_tag = |name: &&&String| {
        let name = name.to_ascii_lowercase();
        let whole = name.strip_suffix(".gguf").unwrap_or(&name);
        let stem = ShardName::parse(&name).map_or(whole, |shard| shard.stem);
        let before = stem.strip_suffix(&tag.to_ascii_lowercase());
        before.is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_', '/']))
    };
    let found: Vec<_> = ggufs.iter().filter(ends_with_tag).collect();
    if let [one] = found[..] {
        return with_shards(one, names);
    }
    let count = if found.is_empty() { "no" } else { "more than one" };
    let all = listed(&ggufs);
    Err(format!("it has {count} .gguf file that ends with {tag}; it has these: {all}"))
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
        let phase = FetchPhase::Check;
        progress(FetchProgress { file: &name, done, total: bytes, phase });
    })?;
    Ok(ReleaseFile { name, sha256, bytes })
}

/// Copies a file to its place. The copy shares nothing with the original that a writer to the
/// original could change: blocks of the disk are shared where the file system copies them on
/// write, names never.
pub(super) fn copy(from: &Path, folder: &ReleaseFolder, name: &str) -> Result<()> {
    let part = folder.path().join(format!(".{name}{PART}"));
    let mut input = File::open(from).map_err(Error::io("open", from))?;
    let mut output = File::create(&part).map_err(Error::io("create", &part))?;
    if !is_cloned(&input, &output) {
        let bytes = input.metadata().map_err(Error::io("read", from))?.len();
        folder.reserve().check(&part, bytes)?;
        std::io::copy(&mut input, &mut output).map_err(Error::io("copy to", &part))?;
    }
    output.sync_all().map_err(Error::io("write", &part))?;
    move_to(&part, folder, name)
}

/// Whether the file system shares the blocks of both files until one of them changes.
fn is_cloned(input: &File, output: &File) -> bool {
    #[cfg(target_os = "linux")]
    return rustix::fs::ioctl_ficlone(output, input).is_ok();
    #[cfg(not(target_os = "linux"))]
    false
}

/// Moves a file of the same disk to its place.
pub(super) fn move_to(from: &Path, folder: &ReleaseFolder, name: &str) -> Result<()> {
    fs::rename(from, folder.path().join(name)).map_err(Error::io("rename", from))
}

//! Sharded safetensors in Hugging Face layout.

use super::{damaged, map_file};
use crate::{Error, Result};
use candle_core::quantized::GgmlDType;
use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub(super) const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Configs and indexes are far smaller, so a larger file is neither.
const MAX_JSON_BYTES: u64 = 64 << 20;

struct ShardEntry {
    shard: usize,
    shape: Vec<usize>,
    dtype: GgmlDType,
    range: Range<usize>,
}

/// The tensors of a folder by name.
pub struct Checkpoint {
    folder: PathBuf,
    shards: Vec<Mmap>,
    entries: BTreeMap<String, ShardEntry>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    pub fn open(folder: &Path) -> Result<Self> {
        let mut checkpoint =
            Self { folder: folder.to_owned(), shards: Vec::new(), entries: BTreeMap::new() };
        let index_path = folder.join(INDEX);
        if !index_path.exists() {
            checkpoint.add_shard(SINGLE)?;
            return Ok(checkpoint);
        }
        let index: Index = serde_json::from_slice(&read_json(&index_path)?)
            .map_err(|e| damaged(&index_path, &e.to_string()))?;
        let mut shards: Vec<&String> = index.weight_map.values().collect();
        shards.sort();
        shards.dedup();
        for name in shards {
            checkpoint.add_shard(name)?;
        }
        checkpoint.check_index(&index_path, &index)?;
        Ok(checkpoint)
    }

    fn add_shard(&mut self, name: &str) -> Result<()> {
        let path = self.folder.join(name);
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(damaged(&path, "its index names a file outside the folder"));
        }
        let map = map_file(&path)?;
        for (tensor, entry) in
            entries(&map, self.shards.len()).map_err(|what| damaged(&path, &what))?
        {
            if self.entries.insert(tensor.clone(), entry).is_some() {
                return Err(damaged(&path, &format!("tensor {tensor:?} is in two shards")));
            }
        }
        self.shards.push(map);
        Ok(())
    }

    fn check_index(&self, path: &Path, index: &Index) -> Result<()> {
        match index.weight_map.keys().find(|name| !self.entries.contains_key(*name)) {
            Some(name) => Err(damaged(path, &format!("tensor {name:?} is in none of its shards"))),
            None => Ok(()),
        }
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| &entry.shape[..])
    }

    /// A tensor's type and bytes.
    pub fn tensor(&self, name: &str) -> Option<(GgmlDType, &[u8])> {
        let entry = self.entries.get(name)?;
        Some((entry.dtype, &self.shards[entry.shard][entry.range.clone()]))
    }
}

fn entries(map: &Mmap, shard: usize) -> Result<Vec<(String, ShardEntry)>, String> {
    let (header_len, metadata) = SafeTensors::read_metadata(map).map_err(|e| e.to_string())?;
    let data_start = header_len + size_of::<u64>();
    let entry = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
        let (start, end) = info.data_offsets;
        let dtype = dtype(info.dtype)
            .ok_or_else(|| format!("tensor {name:?} has the dtype {:?}", info.dtype))?;
        let range = data_start + start..data_start + end;
        if range.end > map.len() {
            return Err(format!("tensor {name:?} ends beyond the file's {} bytes", map.len()));
        }
        Ok((name, ShardEntry { shard, shape: info.shape.clone(), dtype, range }))
    };
    metadata.tensors().into_iter().map(entry).collect()
}

fn dtype(dtype: Dtype) -> Option<GgmlDType> {
    match dtype {
        Dtype::F32 => Some(GgmlDType::F32),
        Dtype::F16 => Some(GgmlDType::F16),
        Dtype::BF16 => Some(GgmlDType::BF16),
        _ => None,
    }
}

/// Reads a JSON file of the folder, up to the limit above.
pub(super) fn read_json(path: &Path) -> Result<Vec<u8>> {
    let io = |source| Error::Io { path: path.to_owned(), source };
    let len = std::fs::metadata(path).map_err(io)?.len();
    if len > MAX_JSON_BYTES {
        return Err(damaged(path, &format!("{len} bytes are too many for this file")));
    }
    std::fs::read(path).map_err(io)
}

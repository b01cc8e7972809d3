//! Sharded safetensors in Hugging Face layout.

use super::file::{Bytes, FileReader, TensorReader};
use super::mxfp4::{self, CODES, SCALES};
use super::quantised;
use super::quantised::form::{ColumnOrder, JoinedForm, JoinedTensor, MatrixRefusal, Quantisation};
use super::shard_entry::ShardEntry;
use super::source::ModelSource;
use crate::error::damaged;
use crate::{Error, Result};
use cresset_kernels::linear::WeightType;
use safetensors::tensor::{Dtype, Metadata};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(super) const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The beginnings of the names of a text model's tensors and of its head, alone and in a model that
/// reads more than text.
const TEXT_PARTS: [[&str; 2]; 3] = [
    ["model.", "lm_head."],
    ["model.language_model.", "lm_head."],
    ["language_model.model.", "language_model.lm_head."],
];
/// The names of the other parts of such a model contain one of these.
const TOWERS: [&str; 6] = [
    "vision_tower.",
    "audio_tower.",
    "multi_modal_projector.",
    "embed_vision.",
    "embed_audio.",
    "visual.",
];
/// Bytes before the header, which hold its length.
const PREFIX: usize = size_of::<u64>();
/// Headers are far smaller, so a larger one is damage.
const MAX_HEADER_BYTES: usize = 100 << 20;

/// The tensors of a folder by name.
pub struct Checkpoint {
    folder: PathBuf,
    /// Names of the files, in the order in which they are read.
    pub(super) shards: Vec<String>,
    readers: Vec<TensorReader>,
    entries: BTreeMap<String, ShardEntry>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Reads the headers of all shards, whose matrices may be quantised.
    pub fn open(
        source: &ModelSource,
        folder: &Path,
        quantisation: Option<&Quantisation>,
    ) -> Result<Self> {
        let mut checkpoint = Self {
            folder: folder.to_owned(),
            shards: Vec::new(),
            readers: Vec::new(),
            entries: BTreeMap::new(),
        };
        let index_path = folder.join(INDEX);
        let Some(index) = source.read(INDEX)? else {
            checkpoint.add_shard(source, SINGLE)?;
            checkpoint.join(quantisation)?;
            return Ok(checkpoint);
        };
        let index: Index =
            serde_json::from_slice(&index).map_err(|e| damaged(&index_path, &e.to_string()))?;
        let mut shards: Vec<&String> = index.weight_map.values().collect();
        shards.sort();
        shards.dedup();
        for name in shards {
            checkpoint.add_shard(source, name)?;
        }
        checkpoint.check_index(&index_path, &index)?;
        checkpoint.join(quantisation)?;
        Ok(checkpoint)
    }

    /// Makes one entry of the tensors of each quantised matrix.
    fn join(&mut self, quantisation: Option<&Quantisation>) -> Result<()> {
        self.join_mxfp4()?;
        if let Some(quantisation) = quantisation {
            let joined = quantised::join(&mut self.entries, quantisation);
            joined.map_err(|what| self.refused(what))?;
        }
        match self.entries.iter().find(|(_, entry)| entry.dtype.is_none()) {
            Some((name, entry)) => {
                let what = format!("tensor {name:?} has the dtype {:?}", entry.stored);
                let unsaid =
                    if quantisation.is_some() { "" } else { " and no quantization_config" };
                Err(damaged(&self.folder, &format!("{what}{unsaid}")))
            }
            None => Ok(()),
        }
    }

    fn refused(&self, what: MatrixRefusal) -> Error {
        match what {
            MatrixRefusal::Damaged(what) => damaged(&self.folder, &what),
            MatrixRefusal::Unsupported(what) => {
                Error::Unsupported(format!("{}: {what}", self.folder.display()))
            }
        }
    }

    /// Makes one entry of the codes and the scales of each tensor in MXFP4.
    fn join_mxfp4(&mut self) -> Result<()> {
        let is_bytes = |(name, entry): (&String, &ShardEntry)| {
            (entry.stored == Dtype::U8).then(|| name.clone())
        };
        let bytes: Vec<String> = self.entries.iter().filter_map(is_bytes).collect();
        for name in bytes.iter().filter_map(|name| name.strip_suffix(CODES)) {
            let parts = [CODES, SCALES].map(|end| self.entries.remove(&format!("{name}{end}")));
            let [Some(codes), Some(scales)] = parts else {
                return Err(damaged(&self.folder, &format!("tensor {name:?} has no scales")));
            };
            let shape = mxfp4::shape(&codes.shape, &scales.shape).ok_or_else(|| {
                let what = format!("{:?} scales for {:?} codes", scales.shape, codes.shape);
                damaged(&self.folder, &format!("tensor {name:?} has {what}"))
            })?;
            let parts = [(CODES, codes.shard), (SCALES, scales.shard)];
            let parts = parts.map(|(end, shard)| (format!("{name}{end}"), shard)).to_vec();
            let joined = JoinedTensor { parts, form: JoinedForm::Mxfp4 };
            let entry = ShardEntry::joined(shape, WeightType::MXFP4, joined);
            self.entries.insert(name.to_owned(), entry);
        }
        Ok(())
    }

    fn add_shard(&mut self, source: &ModelSource, name: &str) -> Result<()> {
        let path = self.folder.join(name);
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(damaged(&path, "its index names a file outside the folder"));
        }
        let mut file = source.open(name)?;
        let found = entries(&mut file, self.readers.len()).map_err(|what| damaged(&path, &what))?;
        let ranges: Vec<_> =
            found.iter().map(|(tensor, entry)| (tensor.clone(), entry.range.clone())).collect();
        for (tensor, entry) in found {
            if self.entries.insert(tensor.clone(), entry).is_some() {
                return Err(damaged(&path, &format!("tensor {tensor:?} is in two shards")));
            }
        }
        self.readers.push(TensorReader::new(file, ranges.into_iter()));
        self.shards.push(name.to_owned());
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

    /// The name under which the checkpoint has a tensor of its text model.
    pub(super) fn stored(&self, name: &str) -> String {
        let [layers, head] = self.text_part();
        for (usual, own) in [("model.", layers), ("lm_head.", head)] {
            if let Some(rest) = name.strip_prefix(usual) {
                return format!("{own}{rest}");
            }
        }
        name.to_owned()
    }

    /// The tensors of towers, which no text needs, in a model that reads more than text.
    pub(super) fn towers(&self) -> Vec<String> {
        let is_inside = self.text_part() != TEXT_PARTS[0];
        let is_tower = |name: &&str| {
            TOWERS
                .iter()
                .any(|tower| if is_inside { name.contains(tower) } else { name.starts_with(tower) })
        };
        self.names().filter(is_tower).map(str::to_owned).collect()
    }

    fn text_part(&self) -> [&'static str; 2] {
        let has = |[layers, _]: &[&str; 2]| {
            self.entries.contains_key(&format!("{layers}embed_tokens.weight"))
        };
        TEXT_PARTS.into_iter().find(has).unwrap_or(TEXT_PARTS[0])
    }

    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| &entry.shape[..])
    }

    pub(crate) fn dtype(&self, name: &str) -> Option<WeightType> {
        self.entries.get(name)?.dtype
    }

    /// Takes a tensor's bytes, and the order of its columns where it has one of its own.
    pub(crate) fn take(&mut self, name: &str) -> Result<(Bytes, ColumnOrder)> {
        let ShardEntry { shard, joined, .. } = &self.entries[name];
        let Some(joined) = joined else {
            return Ok((self.readers[*shard].take(name)?, None));
        };
        let part = |(name, shard): &(String, usize)| self.readers[*shard].take(name);
        let parts = joined.parts.iter().map(part).collect::<Result<Vec<_>>>()?;
        let made = joined.blocks(&parts).map_err(|what| self.refused(what.of(name)))?;
        let (blocks, order) = made;
        Ok((Arc::new(blocks), order))
    }

    /// Reads the rest of all files and checks their digests.
    pub(super) fn finish(self) -> Result<()> {
        self.readers.into_iter().try_for_each(TensorReader::finish)
    }
}

fn entries(file: &mut FileReader, shard: usize) -> Result<Vec<(String, ShardEntry)>, String> {
    let (metadata, data_start) = header(file)?;
    if data_start + metadata.data_len() != file.len() {
        return Err(format!("its tensors do not end at the file's {} bytes", file.len()));
    }
    let entry = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
        let (start, end) = info.data_offsets;
        let (stored, dtype) = (info.dtype, weight_type(info.dtype));
        let (shape, range) = (info.shape.clone(), data_start + start..data_start + end);
        (name, ShardEntry { shard, shape, stored, dtype, range, joined: None })
    };
    Ok(metadata.tensors().into_iter().map(entry).collect())
}

/// The header, and the position of the byte behind it.
fn header(file: &mut FileReader) -> Result<(Metadata, usize), String> {
    let prefix =
        peek(file, PREFIX)?.try_into().expect("invariant: `peek` returns what was asked for");
    let len = usize::try_from(u64::from_le_bytes(prefix)).unwrap_or(usize::MAX);
    if len > MAX_HEADER_BYTES {
        return Err(format!("its header claims {len} bytes"));
    }
    // Reading it checks that tensors follow one another without gaps and fit their shapes.
    let metadata = serde_json::from_slice(&peek(file, PREFIX + len)?[PREFIX..]);
    Ok((metadata.map_err(|error| error.to_string())?, PREFIX + len))
}

fn peek(file: &mut FileReader, len: usize) -> Result<&[u8], String> {
    if len > file.len() {
        return Err("its header ends beyond the file".to_owned());
    }
    file.peek(len).map_err(|error| error.to_string())
}

fn weight_type(dtype: Dtype) -> Option<WeightType> {
    match dtype {
        Dtype::F32 => Some(WeightType::F32),
        Dtype::F16 => Some(WeightType::F16),
        Dtype::BF16 => Some(WeightType::BF16),
        _ => None,
    }
}

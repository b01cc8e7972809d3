//! GGUF container (format document: ggml docs/gguf.md, versions 2 and 3), every bound checked.

mod cursor;
mod shards;
#[cfg(test)]
mod tests;
mod value;

pub use shards::ShardName;
pub(super) use shards::ShardReaders;
pub use value::Value;

use super::file::FileReader;
use crate::error::damaged;
use crate::{Error, Result};
use cresset_kernels::linear::WeightType;
use cursor::{Cursor, Parse};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Row-major shape, outermost first (GGUF stores it reversed).
    pub shape: Vec<usize>,
    pub dtype: WeightType,
    /// The index of its file, among those that a model is split into.
    pub shard: usize,
    /// Byte range in the file.
    pub range: Range<usize>,
}

/// The header of a GGUF file, with the tensors of all files that the model is split into.
pub struct GgufFile {
    pub metadata: BTreeMap<String, Value>,
    pub tensors: BTreeMap<String, TensorInfo>,
    /// BLAKE3 of everything before the tensor data, hexadecimal.
    pub header_blake3: String,
    path: PathBuf,
}

impl GgufFile {
    /// Reads the file's header and checks it whole; tensor data is not read. The other shards of a
    /// model are found beside the first.
    pub fn open(path: &Path) -> Result<Self> {
        let open = |name: &str| FileReader::open(&path.with_file_name(name), None);
        Ok(Self::read_all(path, &open)?.0)
    }

    /// The header of a file of which nothing was taken yet. Nothing is taken.
    pub(super) fn read(file: &mut FileReader) -> Result<Self> {
        let path = file.path().to_owned();
        let header = parse(file).map_err(|what| match what {
            GgufRefusal::Damaged(what) => damaged(&path, &what),
            GgufRefusal::Unsupported(what) => {
                Error::Unsupported(format!("{}: {what}", path.display()))
            }
        })?;
        let header_blake3 = blake3::hash(file.peek(header.bytes)?).to_hex().to_string();
        Ok(Self { metadata: header.metadata, tensors: header.tensors, header_blake3, path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Why a header is refused: it is damaged, or the file is sound but of a kind that this build does
/// not read.
enum GgufRefusal {
    Damaged(String),
    Unsupported(String),
}

impl From<String> for GgufRefusal {
    fn from(what: String) -> Self {
        Self::Damaged(what)
    }
}

struct GgufHeader {
    /// Its length.
    bytes: usize,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, TensorInfo>,
}

/// Smallest encodings of one metadata pair and one tensor entry. With the file's length they bound
/// the counts that a header may claim.
const MIN_PAIR_BYTES: usize = 8 + 4 + 1;
const MIN_TENSOR_BYTES: usize = 8 + 4 + 8 + 4 + 8;
const DEFAULT_ALIGNMENT: usize = 32;
const MAX_ALIGNMENT: usize = 1 << 20;
const MAX_DIMENSIONS: usize = 4;

fn parse(file: &mut FileReader) -> Result<GgufHeader, GgufRefusal> {
    let file_len = file.len();
    let mut c = Cursor::new(file);
    check_version(&mut c)?;
    let tensor_count = c.count("tensor", MIN_TENSOR_BYTES)?;
    let pair_count = c.count("metadata", MIN_PAIR_BYTES)?;
    let metadata = read_metadata(&mut c, pair_count)?;
    let entries = read_entries(&mut c, tensor_count)?;
    let alignment = alignment(&metadata)?;
    let bytes = c.position();
    let data_start = bytes.next_multiple_of(alignment);
    let mut tensors = BTreeMap::new();
    for entry in entries {
        let info = entry.place(data_start, alignment, file_len)?;
        tensors.insert(entry.name, info);
    }
    check_overlaps(&tensors)?;
    Ok(GgufHeader { bytes, metadata, tensors })
}

fn check_version(c: &mut Cursor) -> Result<(), GgufRefusal> {
    if c.take(4)? != b"GGUF" {
        return Err(GgufRefusal::Damaged("it does not begin with the GGUF magic".into()));
    }
    match c.u32()? {
        2 | 3 => Ok(()),
        1 => Err(GgufRefusal::Unsupported(
            "GGUF version 1 is not supported: convert it to version 3".into(),
        )),
        v if matches!(v.swap_bytes(), 1..=3) => Err(GgufRefusal::Unsupported(
            "big-endian GGUF files are not supported: use the little-endian file".into(),
        )),
        v => Err(GgufRefusal::Damaged(format!("GGUF version {v} does not exist"))),
    }
}

fn read_metadata(c: &mut Cursor, count: usize) -> Parse<BTreeMap<String, Value>> {
    let mut metadata = BTreeMap::new();
    for _ in 0..count {
        let key = c.string()?;
        let kind = c.u32()?;
        let value = c.value(kind, 0).map_err(|e| format!("metadata {key:?}: {e}"))?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(format!("metadata key {key:?} is there twice"));
        }
    }
    Ok(metadata)
}

fn alignment(metadata: &BTreeMap<String, Value>) -> Parse<usize> {
    let Some(value) = metadata.get("general.alignment") else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value.as_usize() {
        Some(a) if a.is_power_of_two() && a <= MAX_ALIGNMENT => Ok(a),
        _ => Err(format!("general.alignment is {value:?}, not a power of two")),
    }
}

/// A tensor's entry as the header gives it.
struct GgufEntry {
    name: String,
    shape: Vec<usize>,
    dtype: WeightType,
    offset: usize,
}

fn read_entries(c: &mut Cursor, count: usize) -> Result<Vec<GgufEntry>, GgufRefusal> {
    let mut names = std::collections::BTreeSet::new();
    let mut entries = Vec::new();
    for _ in 0..count {
        let entry = read_entry(c)?;
        if !names.insert(entry.name.clone()) {
            return Err(GgufRefusal::Damaged(format!("tensor {:?} is there twice", entry.name)));
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn read_entry(c: &mut Cursor) -> Result<GgufEntry, GgufRefusal> {
    let name = c.string()?;
    let dimensions = c.u32()? as usize;
    if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
        return Err(GgufRefusal::Damaged(format!("tensor {name:?} has {dimensions} dimensions")));
    }
    let mut shape = (0..dimensions).map(|_| c.size()).collect::<Parse<Vec<_>>>()?;
    shape.reverse();
    let dtype = tensor_type(&name, c.u32()?)?;
    Ok(GgufEntry { name, shape, dtype, offset: c.size()? })
}

fn tensor_type(name: &str, id: u32) -> Result<WeightType, GgufRefusal> {
    match (WeightType::from_gguf(id), id) {
        (Some(dtype), _) => Ok(dtype),
        // Types that ggml has beside those: integers, f64 and a format of blocks.
        (None, 24..=28 | 40) => Err(GgufRefusal::Unsupported(format!(
            "tensor {name:?} has the type {id}, which is not supported: use a file \
             quantised as Q4_K_M or IQ4_XS"
        ))),
        _ => Err(GgufRefusal::Damaged(format!("tensor {name:?} has the unknown type {id}"))),
    }
}

impl GgufEntry {
    fn place(&self, data_start: usize, alignment: usize, file_len: usize) -> Parse<TensorInfo> {
        let name = &self.name;
        if !self.offset.is_multiple_of(alignment) {
            return Err(format!("tensor {name:?} is not aligned to {alignment} bytes"));
        }
        let bytes = self
            .bytes()
            .ok_or_else(|| format!("tensor {name:?} has the impossible shape {:?}", self.shape))?;
        let start = data_start.checked_add(self.offset);
        let range = start.and_then(|start| Some(start..start.checked_add(bytes)?));
        match range {
            Some(range) if range.end <= file_len => {
                Ok(TensorInfo { shape: self.shape.clone(), dtype: self.dtype, shard: 0, range })
            }
            _ => Err(format!(
                "tensor {name:?} ({bytes} bytes at offset {}) ends beyond the file's {file_len} bytes",
                self.offset
            )),
        }
    }

    fn bytes(&self) -> Option<usize> {
        let columns = *self.shape.last()?;
        let elements = self.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
        let whole = elements > 0 && columns.is_multiple_of(self.dtype.block_size());
        whole.then_some(elements / self.dtype.block_size())?.checked_mul(self.dtype.type_size())
    }
}

fn check_overlaps(tensors: &BTreeMap<String, TensorInfo>) -> Parse<()> {
    let mut by_start: Vec<_> = tensors.iter().map(|(name, info)| (&info.range, name)).collect();
    by_start.sort_by_key(|(range, _)| range.start);
    match by_start.windows(2).find(|pair| pair[0].0.end > pair[1].0.start) {
        Some(pair) => Err(format!("tensors {:?} and {:?} overlap", pair[0].1, pair[1].1)),
        None => Ok(()),
    }
}

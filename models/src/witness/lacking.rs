//! Files with blocks that candle cannot read: it then gets their header from this crate's reader,
//! and the values of those blocks, and no others, from the kernels' decoding, which the kernels'
//! check compares with values that other programs read.

use super::absence::{Absence, WitnessResult};
use crate::ModelSource;
use crate::arch;
pub(super) use crate::loader::gguf::TensorInfo;
use crate::loader::gguf::{GgufFile, Value};
use crate::loader::safetensors::Checkpoint;
use crate::loader::store::Raw;
use candle_core::quantized::gguf_file::{self, Content, VersionedMagic};
use candle_core::{Device, Tensor};
use cresset_kernels::linear::WeightType;
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

/// The tensors of a file whose type candle lacks.
pub(super) fn tensors(path: &Path) -> crate::Result<BTreeMap<String, TensorInfo>> {
    let mut tensors = GgufFile::open(path)?.tensors;
    tensors.retain(|_, info| info.dtype.in_candle().is_none());
    Ok(tensors)
}

/// The header as candle has it. Tensors whose type candle lacks count as f32 there.
pub(super) fn header(path: &Path) -> crate::Result<Content> {
    let file = GgufFile::open(path)?;
    let info = |(name, info): (String, TensorInfo)| {
        let ggml_dtype = info.dtype.in_candle().unwrap_or(candle_core::quantized::GgmlDType::F32);
        let (shape, offset) = (info.shape.into(), info.range.start as u64);
        (name, gguf_file::TensorInfo { ggml_dtype, shape, offset })
    };
    Ok(Content {
        magic: VersionedMagic::GgufV3,
        metadata: file.metadata.into_iter().map(|(key, value)| (key, in_candle(value))).collect(),
        tensor_infos: file.tensors.into_iter().map(info).collect(),
        tensor_data_offset: 0,
    })
}

/// The values of a tensor whose type candle lacks.
pub(super) fn values(file: &mut (impl Read + Seek), info: &TensorInfo) -> WitnessResult<Tensor> {
    let mut bytes = vec![0; info.range.len()];
    file.seek(SeekFrom::Start(info.range.start as u64))?;
    file.read_exact(&mut bytes)?;
    decoded(info.dtype, &bytes, &info.shape, None)
}

fn decoded(
    dtype: WeightType,
    bytes: &[u8],
    shape: &[usize],
    order: Option<&Arc<[u32]>>,
) -> WitnessResult<Tensor> {
    let cols = shape.last().copied().unwrap_or(0);
    let rows = shape.iter().product::<usize>() / cols.max(1);
    let raw = Raw { dtype, bytes, rows, cols, order };
    let values = raw.values().map_err(Absence::Failed)?;
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// A folder with matrices whose codes and scales are in tensors of their own.
pub(super) struct QuantisedFolder(Checkpoint);

impl QuantisedFolder {
    pub(super) fn open(source: &ModelSource, folder: &Path) -> crate::Result<Self> {
        let config = source.read_needed("config.json")?;
        let quantisation = arch::quantisation(&folder.join("config.json"), &config)?;
        Ok(Self(Checkpoint::open(source, folder, quantisation.as_ref())?))
    }

    /// Whether a stored tensor stands for itself.
    pub(super) fn is_dense(&self, stored: &str) -> bool {
        self.0.dtype(stored).is_some_and(WeightType::is_dense)
    }

    /// The matrices that are quantised, with their shapes.
    pub(super) fn matrices(&self) -> Vec<(String, Vec<usize>)> {
        let names = self.0.names().filter(|name| !self.is_dense(name));
        let shape = |name: &str| self.0.shape(name).unwrap_or_default().to_vec();
        names.map(|name| (name.to_owned(), shape(name))).collect()
    }

    /// Calls `each` with the values of those that are wanted.
    pub(super) fn for_each(
        mut self,
        wanted: &dyn Fn(&str) -> bool,
        each: &mut dyn FnMut(&str, Tensor) -> WitnessResult<()>,
    ) -> WitnessResult<()> {
        for (name, shape) in self.matrices().iter().filter(|(name, _)| wanted(name)) {
            let dtype = self.0.dtype(name).expect("invariant: it is one of the files'");
            let (bytes, order) = self.0.take(name).map_err(Absence::Failed)?;
            each(name, decoded(dtype, &bytes, shape, order.as_ref())?)?;
        }
        Ok(())
    }
}

fn in_candle(value: Value) -> gguf_file::Value {
    use gguf_file::Value as Theirs;
    match value {
        Value::U8(v) => Theirs::U8(v),
        Value::I8(v) => Theirs::I8(v),
        Value::U16(v) => Theirs::U16(v),
        Value::I16(v) => Theirs::I16(v),
        Value::U32(v) => Theirs::U32(v),
        Value::I32(v) => Theirs::I32(v),
        Value::U64(v) => Theirs::U64(v),
        Value::I64(v) => Theirs::I64(v),
        Value::F32(v) => Theirs::F32(v),
        Value::F64(v) => Theirs::F64(v),
        Value::Bool(v) => Theirs::Bool(v),
        Value::String(v) => Theirs::String(v),
        Value::Array(values) => Theirs::Array(values.into_iter().map(in_candle).collect()),
    }
}

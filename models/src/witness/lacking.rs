//! GGUF files with blocks that candle cannot read: it then gets the header from this crate's
//! reader, and the values of those blocks, and no others, from the kernels' decoding, which the
//! kernels' check compares with the values of ggml's own package.

use super::WitnessResult;
use crate::loader::gguf::{GgufFile, TensorInfo, Value};
use crate::loader::store::Raw;
use candle_core::quantized::gguf_file::{self, Content, VersionedMagic};
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

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
    let cols = info.shape.last().copied().unwrap_or(0);
    let rows = info.shape.iter().product::<usize>() / cols.max(1);
    let raw = Raw { dtype: info.dtype, bytes: &bytes, rows, cols };
    let values = raw.values().map_err(super::Absence::Failed)?;
    Ok(Tensor::from_vec(values, info.shape.clone(), &Device::Cpu)?)
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

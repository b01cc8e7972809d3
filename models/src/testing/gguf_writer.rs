//! Writes GGUF version 3.

use crate::loader::gguf::{GgufFile, TensorInfo, Value};
use candle_core::quantized::QTensor;
use candle_core::{Device, Tensor};
use cresset_kernels::gpu::DeviceElement;
use cresset_kernels::linear::WeightType;
use std::path::Path;

const ALIGNMENT: usize = 32;

#[derive(Clone, Debug, Default)]
pub struct GgufWriter {
    pub metadata: Vec<(String, Value)>,
    /// Name, row-major shape, type, raw blocks.
    pub tensors: Vec<(String, Vec<usize>, WeightType, Vec<u8>)>,
}

impl GgufWriter {
    /// A whole file, to be changed before it is written again.
    pub fn read(path: &Path) -> crate::Result<Self> {
        let header = GgufFile::open(path)?;
        let io = |source| crate::Error::Io { path: path.to_owned(), source };
        let bytes = std::fs::read(path).map_err(io)?;
        let tensor = |(name, info): (String, TensorInfo)| {
            (name, info.shape, info.dtype, bytes[info.range].to_vec())
        };
        let tensors = header.tensors.into_iter().map(tensor).collect();
        Ok(Self { metadata: header.metadata.into_iter().collect(), tensors })
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The raw blocks of a tensor.
    pub fn data(&mut self, name: &str) -> Option<&mut Vec<u8>> {
        let found = self.tensors.iter_mut().find(|(own, ..)| own == name);
        found.map(|(.., data)| data)
    }

    /// Replaces the value of a key.
    pub fn set(&mut self, key: &str, value: Value) {
        self.metadata.retain(|(name, _)| name != key);
        self.metadata.push((key.to_owned(), value));
    }

    /// Adds a tensor in f32.
    pub fn f32(&mut self, name: &str, shape: &[usize], data: &[f32]) {
        self.tensors.push((
            name.to_owned(),
            shape.to_vec(),
            WeightType::F32,
            super::little_endian(data),
        ));
    }

    /// Turns matrices, or stacks of them, that are f32 into blocks of the types that `types` names
    /// for them.
    pub fn quantise(&mut self, types: impl Fn(&str) -> Option<WeightType>) -> crate::Result<()> {
        for (name, shape, dtype, data) in &mut self.tensors {
            if let (&[ref heights @ .., height, cols], Some(to)) = (&shape[..], types(name)) {
                let rows = heights.iter().product::<usize>() * height;
                let lacking = || crate::Error::Unsupported(format!("quantising to {}", to.name()));
                let theirs = to.in_candle().ok_or_else(lacking)?;
                let values = Tensor::from_vec(f32::decode(data), (rows, cols), &Device::Cpu)?;
                *data = QTensor::quantize(&values, theirs)?.data()?.into_owned();
                *dtype = to;
            }
        }
        Ok(())
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let (mut out, _) = self.header();
        for (.., data) in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            out.extend(data);
        }
        out
    }

    /// The bytes before the tensors' own, and the length of the whole file. The blocks need not be
    /// there.
    pub fn header(&self) -> (Vec<u8>, usize) {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        put_size(&mut out, self.tensors.len());
        put_size(&mut out, self.metadata.len());
        for (key, value) in &self.metadata {
            put_string(&mut out, key);
            out.extend(kind(value).to_le_bytes());
            put_value(&mut out, value);
        }
        let mut offset = 0;
        for (name, shape, dtype, _) in &self.tensors {
            put_string(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            for dimension in shape.iter().rev() {
                put_size(&mut out, *dimension);
            }
            let id = dtype.gguf_id().expect("invariant: a type that GGUF files have");
            out.extend(id.to_le_bytes());
            put_size(&mut out, offset);
            let blocks = shape.iter().product::<usize>() / dtype.block_size();
            offset += (blocks * dtype.type_size()).next_multiple_of(ALIGNMENT);
        }
        let len = out.len().next_multiple_of(ALIGNMENT) + offset;
        (out, len)
    }
}

fn put_size(out: &mut Vec<u8>, size: usize) {
    out.extend((size as u64).to_le_bytes());
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    put_size(out, text.len());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(v) => put_string(out, v),
        Value::Array(values) => {
            out.extend(values.first().map_or(4, kind).to_le_bytes());
            put_size(out, values.len());
            for value in values {
                put_value(out, value);
            }
        }
    }
}

fn kind(value: &Value) -> u32 {
    match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12,
    }
}

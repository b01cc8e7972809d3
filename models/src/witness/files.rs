//! Weights as candle reads and dequantises them, under Hugging Face's names and in its layout.

use super::absence::{Absence, WitnessResult, unknown};
use super::facts::{Facts, open};
use super::lacking;
use super::lacking::QuantisedFolder;
use crate::{FileLayout, ModelSource};
use candle_core::quantized::gguf_file::{Content, TensorInfo};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The files of a release. The header of a GGUF file is read once: it has the vocabulary.
pub(super) struct WeightFiles {
    source: ModelSource,
    /// As candle has it, with the tensors whose type candle lacks.
    gguf: Option<(Content, BTreeMap<String, lacking::TensorInfo>)>,
}

impl WeightFiles {
    pub(super) fn open(source: &ModelSource) -> WitnessResult<Self> {
        let gguf = match source.layout() {
            FileLayout::Gguf(path) => {
                Some((open(path)?.0, lacking::tensors(path).map_err(Absence::Failed)?))
            }
            FileLayout::HfFolder(_) => None,
        };
        Ok(Self { source: source.clone(), gguf })
    }
}

/// The tensors of a release by their stored names, with the number of their values.
fn sizes(files: &WeightFiles) -> WitnessResult<Vec<(String, u64)>> {
    let mut found = Vec::new();
    let source = &files.source;
    match source.layout() {
        FileLayout::Gguf(_) => {
            let content = files.gguf.iter().map(|(content, _)| content);
            let count = |info: &TensorInfo| info.shape.elem_count() as u64;
            let all = content.flat_map(|content| &content.tensor_infos);
            found.extend(all.map(|(name, t)| (name.clone(), count(t))));
        }
        FileLayout::HfFolder(folder) => {
            for file in shards(folder)? {
                let (_, entries) = header(&mut File::open(file)?)?;
                let count = |entry: &Entry| entry.shape.iter().product::<usize>() as u64;
                found.extend(entries.into_iter().map(|(name, entry)| (name, count(&entry))));
            }
            if let Some(quantised) = quantised(source, folder)? {
                found.retain(|(name, _)| quantised.is_dense(name));
                let matrices = quantised.matrices().into_iter();
                found.extend(
                    matrices.map(|(name, shape)| (name, shape.iter().product::<usize>() as u64)),
                );
            }
        }
    }
    Ok(found)
}

/// A tensor in a safetensors file.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    /// First byte and the one behind the last, counted from the end of the header.
    data_offsets: [u64; 2],
}

/// The length of a safetensors file's header in bytes, with the eight that tell it, and its
/// tensors by name.
fn header(file: &mut File) -> WitnessResult<(u64, BTreeMap<String, Entry>)> {
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    let mut text = Vec::new();
    file.take(length).read_to_end(&mut text)?;
    let mut all: BTreeMap<String, Value> = serde_json::from_slice(&text).unwrap_or_default();
    all.remove("__metadata__");
    let entry = |(name, value)| Some((name, serde_json::from_value(value).ok()?));
    Ok((8 + length, all.into_iter().filter_map(entry).collect()))
}

/// The folder's matrices, if a tensor holds something else than floats.
fn quantised(source: &ModelSource, folder: &Path) -> WitnessResult<Option<QuantisedFolder>> {
    for file in shards(folder)? {
        let (_, entries) = header(&mut File::open(file)?)?;
        if entries.values().any(|entry| entry.dtype().is_none()) {
            return QuantisedFolder::open(source, folder).map(Some).map_err(Absence::Failed);
        }
    }
    Ok(None)
}

impl Entry {
    /// The type of its values, if they are floats that candle has.
    fn dtype(&self) -> Option<DType> {
        Some(match self.dtype.as_str() {
            "F64" => DType::F64,
            "F32" => DType::F32,
            "F16" => DType::F16,
            "BF16" => DType::BF16,
            _ => return None,
        })
    }

    /// The values as f32.
    fn read(&self, file: &mut File, header: u64) -> WitnessResult<Tensor> {
        let Some(dtype) = self.dtype() else {
            return unknown(format!("it has values of the type {}", self.dtype));
        };
        let [first, end] = self.data_offsets;
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(header + first))?;
        file.take(end.saturating_sub(first)).read_to_end(&mut bytes)?;
        if bytes.len() != dtype.size_in_bytes() * self.shape.iter().product::<usize>() {
            return unknown("a tensor of its file is cut short");
        }
        let stored = Tensor::from_raw_buffer(&bytes, dtype, &self.shape, &Device::Cpu)?;
        Ok(stored.to_dtype(DType::F32)?)
    }
}

fn shards(folder: &Path) -> WitnessResult<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    let paths = entries.into_iter().map(|entry| entry.path());
    Ok(paths.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect())
}

/// Calls `each` with the stored name and the f32 values of every tensor whose stored name is
/// wanted, one at a time.
fn for_each(
    files: &WeightFiles,
    wanted: &dyn Fn(&str) -> bool,
    each: &mut dyn FnMut(&str, Tensor) -> WitnessResult<()>,
) -> WitnessResult<()> {
    let source = &files.source;
    match source.layout() {
        FileLayout::Gguf(path) => {
            let Some((content, lacking)) = &files.gguf else { return Ok(()) };
            let mut reader = File::open(path)?;
            let mut names: Vec<_> = content.tensor_infos.iter().collect();
            names.retain(|(name, _)| wanted(name));
            names.sort_by_key(|(_, info)| info.offset);
            for (name, _) in names {
                let values = if let Some(info) = lacking.get(name) {
                    lacking::values(&mut reader, info)?
                } else {
                    content.tensor(&mut reader, name, &Device::Cpu)?.dequantize(&Device::Cpu)?
                };
                each(name, values)?;
            }
        }
        FileLayout::HfFolder(folder) => {
            let quantised = quantised(source, folder)?;
            let is_read = |name: &str| {
                wanted(name) && quantised.as_ref().is_none_or(|quantised| quantised.is_dense(name))
            };
            for file in shards(folder)? {
                let mut file = File::open(file)?;
                let (length, entries) = header(&mut file)?;
                for (name, entry) in entries.iter().filter(|(name, _)| is_read(name)) {
                    each(name, entry.read(&mut file, length)?)?;
                }
            }
            if let Some(quantised) = quantised {
                quantised.for_each(wanted, each)?;
            }
        }
    }
    Ok(())
}

/// Tensors on the device by Hugging Face's name and in its layout: those whose name there is
/// wanted.
pub(super) fn tensors(
    files: &WeightFiles,
    facts: &Facts,
    device: &Device,
    wanted: &dyn Fn(&str) -> bool,
) -> WitnessResult<HashMap<String, Tensor>> {
    let names = names(files, facts)?;
    let of = |stored: &str| names.get(stored).filter(|(name, _)| wanted(name));
    let mut found = HashMap::new();
    for_each(files, &|stored| of(stored).is_some(), &mut |stored, values| {
        let (name, _) = &names[stored];
        found.insert(name.clone(), in_hf_layout(name, values, facts)?.to_device(device)?);
        Ok(())
    })?;
    Ok(found)
}

/// By its stored name: the name of each tensor of the model, and the number of its values.
pub(super) fn names(
    files: &WeightFiles,
    facts: &Facts,
) -> WitnessResult<HashMap<String, (String, u64)>> {
    let own = sizes(files)?.into_iter().filter(|(stored, _)| !is_derived(stored));
    own.map(|(stored, values)| {
        let name = hf_name(&stored, &files.source, facts)?;
        Ok((stored, (name, values)))
    })
    .collect()
}

/// Tables that follow from the hyper-parameters.
fn is_derived(stored: &str) -> bool {
    stored.ends_with("rotary_emb.inv_freq") || stored == "rope_freqs.weight"
}

fn hf_name(stored: &str, source: &ModelSource, facts: &Facts) -> WitnessResult<String> {
    if matches!(source.layout(), FileLayout::HfFolder(_)) {
        return Ok(stored.to_owned());
    }
    let whole = match stored {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some("lm_head.weight"),
        _ => None,
    };
    if let Some(name) = whole {
        return Ok(name.into());
    }
    let parts: Vec<&str> = stored.split('.').collect();
    let ["blk", layer, part, kind] = parts[..] else {
        return unknown(format!("candle's model has no tensor {stored}"));
    };
    match module(part, facts) {
        Some(module) => Ok(format!("model.layers.{layer}.{module}.{kind}")),
        None => unknown(format!("candle's model has no tensor {stored}")),
    }
}

/// The part of a layer as Hugging Face names it.
fn module(part: &str, facts: &Facts) -> Option<&'static str> {
    Some(match part {
        "attn_norm" => "input_layernorm",
        "ffn_norm" if facts.norms_plus_one => "pre_feedforward_layernorm",
        "ffn_norm" | "post_attention_norm" => "post_attention_layernorm",
        "post_ffw_norm" => "post_feedforward_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    })
}

/// Undoes what llama.cpp's converter did to a tensor: the rows of Q and K of a Llama are permuted
/// for interleaved rotation, and Gemma's norms have one added.
fn in_hf_layout(name: &str, values: Tensor, facts: &Facts) -> candle_core::Result<Tensor> {
    let heads = match name {
        _ if name.contains("q_proj") => facts.heads,
        _ if name.contains("k_proj") => facts.kv_heads,
        _ => 0,
    };
    if facts.permuted && heads > 0 {
        let dims = values.dims().to_vec();
        let rest = dims.get(1).copied().unwrap_or(1);
        let pairs = values.reshape((heads, facts.head_dim / 2, 2, rest))?;
        return pairs.transpose(1, 2)?.contiguous()?.reshape(dims);
    }
    if facts.norms_plus_one && name.ends_with("norm.weight") {
        return values - 1.0;
    }
    Ok(values)
}

/// What the values of a tensor are like.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorStats {
    /// As the file names it.
    pub name: String,
    pub finite: bool,
    /// Root of the mean of the squares of all values but the largest, which would hide itself in a
    /// small tensor.
    pub rms: f64,
    /// Largest absolute value.
    pub max: f32,
}

/// Describes each tensor of a release, in the order of the file.
pub fn tensor_stats(source: &ModelSource) -> crate::Result<Vec<TensorStats>> {
    let mut all = Vec::new();
    let files = WeightFiles::open(source).map_err(crate::Error::from)?;
    let read = for_each(&files, &|_| true, &mut |name, values| {
        let values = values.flatten_all()?.to_vec1::<f32>()?;
        let (mut max, mut squares) = (0f32, 0f64);
        for value in &values {
            let size = value.abs();
            let other = if size > max { std::mem::replace(&mut max, size) } else { size };
            squares += f64::from(other) * f64::from(other);
        }
        let others = values.len().saturating_sub(1);
        all.push(TensorStats {
            name: name.to_owned(),
            finite: values.iter().all(|x| x.is_finite()),
            rms: if others == 0 { max.into() } else { (squares / others as f64).sqrt() },
            max,
        });
        Ok(())
    });
    read.map_err(crate::Error::from)?;
    Ok(all)
}

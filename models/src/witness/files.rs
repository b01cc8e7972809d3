//! Weights as candle reads and dequantises them, under Hugging Face's names and in its layout.

use super::facts::{Facts, open};
use super::{WitnessResult, unknown};
use crate::{FileLayout, ModelSource};
use candle_core::{Device, Tensor};
use serde_json::Value;
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Values of all tensors of a release.
pub(super) fn elements(source: &ModelSource) -> WitnessResult<u64> {
    let mut total = 0;
    match source.layout() {
        FileLayout::Gguf(path) => {
            let (content, _) = open(path)?;
            total +=
                content.tensor_infos.values().map(|t| t.shape.elem_count() as u64).sum::<u64>();
        }
        FileLayout::HfFolder(folder) => {
            for file in shards(folder)? {
                total += header_elements(&file)?;
            }
        }
    }
    Ok(total)
}

/// Values of all tensors that the header of a safetensors file lists.
fn header_elements(file: &Path) -> WitnessResult<u64> {
    let mut file = File::open(file)?;
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let mut header = Vec::new();
    file.take(u64::from_le_bytes(length)).read_to_end(&mut header)?;
    let header: Value = serde_json::from_slice(&header).unwrap_or_default();
    let shapes =
        header.as_object().into_iter().flatten().filter_map(|(_, t)| t["shape"].as_array());
    let elements = |shape: &Vec<Value>| shape.iter().filter_map(Value::as_u64).product::<u64>();
    Ok(shapes.map(elements).sum())
}

fn shards(folder: &Path) -> WitnessResult<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    let paths = entries.into_iter().map(|entry| entry.path());
    Ok(paths.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect())
}

/// Calls `each` with the stored name and the f32 values of every tensor, one at a time.
fn for_each(
    source: &ModelSource,
    each: &mut dyn FnMut(&str, Tensor) -> WitnessResult<()>,
) -> WitnessResult<()> {
    match source.layout() {
        FileLayout::Gguf(path) => {
            let (content, mut reader) = open(path)?;
            let mut names: Vec<_> = content.tensor_infos.iter().collect();
            names.sort_by_key(|(_, info)| info.offset);
            for (name, _) in names {
                let stored = content.tensor(&mut reader, name, &Device::Cpu)?;
                each(name, stored.dequantize(&Device::Cpu)?)?;
            }
        }
        FileLayout::HfFolder(folder) => {
            for file in shards(folder)? {
                for (name, tensor) in candle_core::safetensors::load(file, &Device::Cpu)? {
                    each(&name, tensor.to_dtype(candle_core::DType::F32)?)?;
                }
            }
        }
    }
    Ok(())
}

pub(super) fn tensors(
    source: &ModelSource,
    facts: &Facts,
) -> WitnessResult<HashMap<String, Tensor>> {
    let mut found = HashMap::new();
    let is_gguf = matches!(source.layout(), FileLayout::Gguf(_));
    for_each(source, &mut |stored, values| {
        if stored.ends_with("rotary_emb.inv_freq") || stored == "rope_freqs.weight" {
            return Ok(());
        }
        let name = if is_gguf { hf_name(stored, facts)? } else { stored.to_owned() };
        let values = in_hf_layout(&name, values, facts)?;
        found.insert(name, values);
        Ok(())
    })?;
    if facts.tied {
        found.remove("lm_head.weight");
    }
    Ok(found)
}

fn hf_name(stored: &str, facts: &Facts) -> WitnessResult<String> {
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
    let read = for_each(source, &mut |name, values| {
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

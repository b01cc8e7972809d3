//! Every family against transformers: tiny random models, whose logits are stored with the other
//! goldens. Their weights follow from the tensors' names; their GGUF files are, byte for byte in
//! the tensors, what llama.cpp's converter writes.

use super::*;
use crate::arch;
use crate::loader::gguf::Value;
use crate::loader::names;
use crate::testing::{GgufWriter, interleaved};
use candle_core::quantized::GgmlDType;
use candle_transformers::models::{gemma2, gemma3, mistral, qwen2, qwen3};
use cresset_kernels::linear::Weight;
use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/goldens");

#[derive(Deserialize)]
pub struct Goldens {
    pub cases: Vec<Case>,
}

#[derive(Deserialize)]
pub struct Case {
    pub name: String,
    /// Type of the stored weights.
    dtype: GoldenType,
    pub config: serde_json::Value,
    /// The same config in the layout of earlier versions.
    older_config: serde_json::Value,
    tensors: BTreeMap<String, Vec<usize>>,
    pub tokens: Vec<u32>,
    /// The GGUF file's metadata, if it can hold all of the config.
    gguf: Option<Converted>,
}

#[derive(Clone, Copy, Deserialize)]
enum GoldenType {
    F32,
    F16,
    BF16,
}

#[derive(Deserialize)]
struct Converted {
    metadata: BTreeMap<String, serde_json::Value>,
    /// Tensors that the checkpoint does not have.
    extra: BTreeMap<String, Vec<f32>>,
    /// First eight bytes of the SHA-256 of each tensor.
    digests: BTreeMap<String, String>,
}

/// Uniform in [-1, 1): SplitMix64 seeded by the FNV-1a hash of the name, 24 bits of each.
fn random(name: &str, count: usize) -> impl Iterator<Item = f32> {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, fnv);
    (1..=count as u64).map(move |i| {
        let mut mixed = seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}

impl Case {
    fn kind(&self) -> &str {
        self.config["model_type"].as_str().unwrap()
    }

    fn weights(&self, name: &str, shape: &[usize]) -> Vec<f32> {
        let (scale, shift) = match shape {
            [_, cols] if name.ends_with("_proj.weight") => (2.5 / (*cols as f32).sqrt(), 0.0),
            _ if name.ends_with("norm.weight") => {
                (0.2, if self.kind().starts_with("gemma") { 0.0 } else { 1.0 })
            }
            _ => (0.5, 0.0),
        };
        random(name, shape.iter().product())
            .map(|x| self.dtype.rounded(x * scale + shift))
            .collect()
    }

    fn folder(&self, config: &serde_json::Value) -> CpuModel {
        self.in_folder(config, |source| self.load(source))
    }

    /// Calls `load` with the folder of its files, which exist during the call.
    pub fn in_folder<T>(
        &self,
        config: &serde_json::Value,
        load: impl FnOnce(&ModelSource) -> T,
    ) -> T {
        let folder = tempfile::tempdir().unwrap();
        let bytes = |(name, shape): (&String, &Vec<usize>)| {
            let data: Vec<u8> =
                self.weights(name, shape).into_iter().flat_map(|x| self.dtype.bytes(x)).collect();
            (name.clone(), shape.clone(), data)
        };
        let tensors: Vec<_> = self.tensors.iter().map(bytes).collect();
        let view = |(name, shape, data)| {
            (name, TensorView::new(self.dtype.stored(), Vec::clone(shape), data).unwrap())
        };
        let views = tensors.iter().map(|(name, shape, data)| view((name, shape, data)));
        safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors"))
            .unwrap();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        load(&ModelSource::hf_folder(folder.path().to_owned()))
    }

    fn gguf(&self, converted: &Converted) -> CpuModel {
        let mut writer = GgufWriter::default();
        writer
            .metadata
            .extend(converted.metadata.iter().map(|(key, value)| (key.clone(), metadata(value))));
        let names = arch::from_hf(Path::new("config.json"), self.config.to_string().as_bytes())
            .unwrap()
            .options
            .names;
        for (name, shape) in &self.tensors {
            let mut data = self.weights(name, shape);
            if names.norms_less_one && name.ends_with("norm.weight") {
                data = data.into_iter().map(|x| x + 1.0).collect();
            }
            if ["llama", "mistral"].contains(&self.kind())
                && (name.contains("q_proj") || name.contains("k_proj"))
            {
                data = interleaved(
                    &data,
                    shape[1],
                    self.config["head_dim"].as_u64().unwrap() as usize,
                );
            }
            writer.f32(&names::gguf(name, names.gguf).unwrap(), shape, &data);
        }
        for (name, data) in &converted.extra {
            writer.f32(name, &[data.len()], data);
        }
        let digest = |data: &[u8]| hex::encode(&Sha256::digest(data)[..8]);
        let digests = writer.tensors.iter().map(|(name, .., data)| (name.clone(), digest(data)));
        assert_eq!(digests.collect::<BTreeMap<_, _>>(), converted.digests, "{}", self.name);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), writer.to_bytes()).unwrap();
        self.load(&ModelSource::gguf(file.path().to_owned()))
    }

    /// The longest context is the prompt's length, so LongRoPE chooses as for one pass over it.
    fn load(&self, source: &ModelSource) -> CpuModel {
        let options = ModelOptions { max_context: Some(self.tokens.len()), ..options() };
        load(source, &options).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    fn check(&self, mut model: CpuModel, want: &[Vec<f32>]) {
        for chunk in [1, 7, self.tokens.len()] {
            assert_close(&alone(&mut model, &self.tokens, chunk), want, &self.name);
        }
    }
}

impl GoldenType {
    fn rounded(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::F16 => f16::from_f32(x).to_f32(),
            Self::BF16 => bf16::from_f32(x).to_f32(),
        }
    }

    fn bytes(self, x: f32) -> Vec<u8> {
        match self {
            Self::F32 => x.to_le_bytes().to_vec(),
            Self::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
            Self::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        }
    }

    fn stored(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::BF16 => Dtype::BF16,
        }
    }
}

fn metadata(value: &serde_json::Value) -> Value {
    match value {
        serde_json::Value::String(text) => Value::String(text.clone()),
        serde_json::Value::Bool(flag) => Value::Bool(*flag),
        serde_json::Value::Array(values) => Value::Array(values.iter().map(metadata).collect()),
        number if number.is_u64() => Value::U32(number.as_u64().unwrap().try_into().unwrap()),
        number => Value::F32(number.as_f64().unwrap() as f32),
    }
}

pub fn stored(file: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(format!("{FOLDER}/{file}"), &Device::Cpu).unwrap()
}

pub fn goldens() -> Goldens {
    serde_json::from_slice(&std::fs::read(format!("{FOLDER}/architectures.json")).unwrap()).unwrap()
}

#[test]
fn every_family_equals_transformers() {
    let goldens = goldens();
    let logits = stored("architectures.safetensors");
    assert_eq!(goldens.cases.len(), logits.len());
    for case in &goldens.cases {
        let want = rows(&logits[&case.name]);
        case.check(case.folder(&case.config), &want);
        case.check(case.folder(&case.older_config), &want);
        if let Some(converted) = &case.gguf {
            case.check(case.gguf(converted), &want);
        }
    }
}

/// GGUF files may list the sliding layers instead of relying on the family's pattern.
#[test]
fn listed_sliding_layers_are_obeyed() {
    let mut case = goldens().cases.into_iter().find(|case| case.name == "gemma3").unwrap();
    let want = rows(&stored("architectures.safetensors")["gemma3"]);
    let mut converted = case.gguf.take().unwrap();
    let mut with = |full: usize| {
        let list: Vec<bool> = (0..7).map(|layer| layer != full).collect();
        converted.metadata.insert("gemma3.attention.sliding_window_pattern".into(), list.into());
        alone(&mut case.gguf(&converted), &case.tokens, 40)
    };
    assert_close(&with(5), &want, "the family's pattern");
    assert_ne!(with(2), with(5));
}

type Step = Box<dyn FnMut(&Tensor, usize) -> candle_core::Result<Tensor>>;

/// candle-transformers' model of a case: computes the logits of a token from its position.
fn candle(case: &Case) -> candle_core::Result<Step> {
    let weights = |(name, shape): (&String, &Vec<usize>)| {
        Ok((name.clone(), Tensor::from_vec(case.weights(name, shape), &shape[..], &Device::Cpu)?))
    };
    let weights =
        case.tensors.iter().map(weights).collect::<candle_core::Result<HashMap<_, _>>>()?;
    let weights = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let mut config = case.older_config.clone();
    if case.kind() == "qwen2" {
        config["sliding_window"] = 4096.into();
    }
    Ok(match case.kind() {
        "mistral" => {
            let mut model = mistral::Model::new(&serde_json::from_value(config).unwrap(), weights)?;
            Box::new(move |token, position| model.forward(token, position))
        }
        "qwen2" => {
            let mut model =
                qwen2::ModelForCausalLM::new(&serde_json::from_value(config).unwrap(), weights)?;
            Box::new(move |token, position| model.forward(token, position))
        }
        "qwen3" => {
            let mut model =
                qwen3::ModelForCausalLM::new(&serde_json::from_value(config).unwrap(), weights)?;
            Box::new(move |token, position| model.forward(token, position))
        }
        "gemma2" => {
            let mut model =
                gemma2::Model::new(false, &serde_json::from_value(config).unwrap(), weights)?;
            Box::new(move |token, position| model.forward(token, position))
        }
        _ => {
            let mut model =
                gemma3::Model::new(false, &serde_json::from_value(config).unwrap(), weights)?;
            Box::new(move |token, position| model.forward(token, position))
        }
    })
}

/// The second reference, for models that candle has. Its Gemma 2 ignores the window, so it is
/// compared only within the window.
#[test]
fn candles_models_agree() {
    for (name, tokens) in
        [("mistral", 40), ("qwen2", 40), ("qwen3", 40), ("gemma2", 8), ("gemma3", 40)]
    {
        let goldens = goldens();
        let case = goldens.cases.iter().find(|case| case.name == name).unwrap();
        let mut candle = candle(case).unwrap();
        let step = |(position, token): (usize, &u32)| {
            let token = Tensor::new(&[[*token]], &Device::Cpu).unwrap();
            candle(&token, position).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        let want: Vec<Vec<f32>> = case.tokens[..tokens].iter().enumerate().map(step).collect();
        let mut ours = case.folder(&case.config);
        assert_close(&alone(&mut ours, &case.tokens[..tokens], 1), &want, name);
    }
}

#[test]
fn every_block_format_decodes_to_the_reference_values() {
    let blocks = stored("blocks.safetensors");
    for (name, dtype) in [
        ("Q4_0", GgmlDType::Q4_0),
        ("Q4_1", GgmlDType::Q4_1),
        ("Q5_0", GgmlDType::Q5_0),
        ("Q5_1", GgmlDType::Q5_1),
        ("Q8_0", GgmlDType::Q8_0),
        ("Q2_K", GgmlDType::Q2K),
        ("Q3_K", GgmlDType::Q3K),
        ("Q4_K", GgmlDType::Q4K),
        ("Q5_K", GgmlDType::Q5K),
        ("Q6_K", GgmlDType::Q6K),
        ("F16", GgmlDType::F16),
        ("BF16", GgmlDType::BF16),
    ] {
        let raw = blocks[&format!("{name}.raw")].flatten_all().unwrap().to_vec1::<u8>().unwrap();
        let want = rows(&blocks[&format!("{name}.values")]);
        let weight = Weight::from_ggml(dtype, &raw, want.len(), want[0].len()).unwrap();
        for (row, want) in want.iter().enumerate() {
            let mut got = vec![0.0; want.len()];
            weight.row_f32(row, &mut got);
            assert_eq!(&got, want, "{name}, row {row}");
        }
    }
}

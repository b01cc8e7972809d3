//! Tells from a release's headers whether this build can load it, and what it is: the decoder is
//! built as for serving, from names and shapes, without reading a weight.

use crate::cuda::cache::context_bytes;
use crate::cuda::store::{device_bytes, expert_bytes};
use crate::decoder::{Decoder, DecoderOptions};
use crate::loader::gguf::{GgufFile, Value};
use crate::loader::store::{Raw, WeightStore};
use crate::loader::tensors::Reading;
use crate::{FileLayout, ModelConfig, ModelOptions, ModelSource, Result};
use candle_core::{Device, Tensor};
use cresset_kernels::Compute;
use cresset_kernels::gpu::Kind;
use cresset_kernels::linear::WeightType;
use cresset_kernels::linear::{Mode, Weight};
use std::collections::BTreeMap;

/// The types of weights that are not quantised.
const DENSE: [&str; 3] = ["F32", "F16", "BF16"];

/// A description of a release, which its headers contain.
#[derive(Clone, Debug)]
pub struct ModelCard {
    /// As the files name it.
    pub architecture: String,
    pub config: ModelConfig,
    /// Parameters by the type in which the files keep them, such as `Q4_K`.
    pub types: BTreeMap<String, u64>,
    /// Bytes of the weights in the memory of a CPU.
    pub cpu_bytes: u64,
    /// Bytes of the weights on a GPU, beside activations in bf16.
    pub gpu_bytes: u64,
}

impl ModelCard {
    pub fn parameters(&self) -> u64 {
        self.types.values().sum()
    }

    /// Bytes that one token takes in a GPU's cache while all windows show it: K and V of all
    /// layers, and its id.
    pub fn gpu_token_bytes(&self, options: &ModelOptions) -> usize {
        context_bytes(&self.on_gpu(options), 1, 1, 1)
    }

    /// Bytes that a sequence of `tokens` takes at most in a GPU's cache.
    pub fn gpu_context_bytes(&self, options: &ModelOptions, tokens: usize) -> usize {
        let in_flight = options.most_in_flight();
        context_bytes(&self.on_gpu(options), tokens, options.block_size, in_flight)
    }

    /// The same in the cache of a CPU.
    pub fn cpu_context_bytes(&self, options: &ModelOptions, tokens: usize) -> usize {
        self.config.context_bytes(tokens, options.block_size, options.most_in_flight())
    }

    fn on_gpu(&self, options: &ModelOptions) -> ModelConfig {
        ModelConfig { kv_kind: options.kv_kind(), ..self.config.clone() }
    }

    /// Whether no weight is quantised.
    pub fn is_dense(&self) -> bool {
        self.types.keys().all(|name| DENSE.contains(&name.as_str()))
    }

    /// The type that most parameters have.
    pub fn main_type(&self) -> &str {
        let main = self.types.iter().max_by_key(|(_, count)| **count);
        main.map_or("none", |(name, _)| name)
    }
}

/// A store that counts weights and keeps none.
#[derive(Default)]
struct CountedWeights {
    types: BTreeMap<String, u64>,
    cpu_bytes: u64,
    gpu_bytes: u64,
}

impl CountedWeights {
    /// Counts matrices that take `gpu_bytes` on a GPU.
    fn count_matrices(&mut self, parts: &[Raw], gpu_bytes: usize) -> Result<Weight> {
        for part in parts {
            self.count(part.dtype, part.rows * part.cols);
        }
        self.gpu_bytes += gpu_bytes as u64;
        Ok(Weight::from_ggml(WeightType::F32, &[0; size_of::<f32>()], 1, 1)?)
    }

    /// Counts a vector of `kind`.
    fn count_vector(&mut self, len: usize, kind: Kind) -> Result<Tensor> {
        self.count(WeightType::F32, len);
        self.gpu_bytes += (len * kind.bytes()) as u64;
        Ok(Tensor::from_vec(vec![0f32], 1, &Device::Cpu)?)
    }

    fn count(&mut self, dtype: WeightType, count: usize) {
        self.cpu_bytes += dtype.cpu_bytes(count) as u64;
        *self.types.entry(dtype.name().to_owned()).or_default() += count as u64;
    }
}

impl WeightStore<Compute> for CountedWeights {
    fn matrix(&mut self, parts: &[Raw]) -> Result<Weight> {
        self.count_matrices(parts, device_bytes(parts, Kind::Bf16))
    }

    fn experts(&mut self, parts: &[Raw]) -> Result<Weight> {
        self.count_matrices(parts, expert_bytes(parts, Kind::Bf16))
    }

    fn norm(&mut self, values: Vec<f32>) -> Result<Tensor> {
        self.count_vector(values.len(), Kind::F32)
    }

    fn bias(&mut self, values: Vec<f32>) -> Result<Tensor> {
        self.count_vector(values.len(), Kind::Bf16)
    }
}

/// The release's card, if its files can be loaded. It takes milliseconds and reads headers only:
/// weights may still be damaged.
pub fn inspect(source: &ModelSource) -> Result<ModelCard> {
    let sizes = DecoderOptions {
        kind: Kind::F32,
        mode: Mode::Invariant,
        max_tokens: 1,
        max_logits_rows: 1,
        max_context: 1,
        rounds: false,
        guesses: false,
    };
    let mut weights = CountedWeights::default();
    let decoder = Decoder::load(Compute::new(1), source, &mut weights, Reading::Headers, &sizes)?;
    let CountedWeights { types, cpu_bytes, gpu_bytes } = weights;
    let mut config = decoder.config;
    if types.keys().any(|name| !DENSE.contains(&name.as_str())) {
        config.kv_kind = Kind::F16;
    }
    let architecture = architecture(source)?;
    Ok(ModelCard { architecture, config, types, cpu_bytes, gpu_bytes })
}

/// The architecture's name in the files of a release that can be loaded.
fn architecture(source: &ModelSource) -> Result<String> {
    let name = match source.layout() {
        FileLayout::Gguf(path) => {
            let file = GgufFile::open(path)?;
            file.metadata.get("general.architecture").and_then(Value::as_str).map(str::to_owned)
        }
        FileLayout::HfFolder(_) => {
            let config = source.read_needed("config.json")?;
            let config: serde_json::Value = serde_json::from_slice(&config).unwrap_or_default();
            config["model_type"].as_str().map(str::to_owned)
        }
    };
    Ok(name.unwrap_or_default())
}

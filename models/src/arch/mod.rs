//! One file per architecture: the names it goes by, how its config is read, and its layer.

mod deepseek;
mod gemma2;
mod gemma3;
mod gemma4;
mod gguf_config;
mod glm4_moe;
mod glm4_moe_lite;
mod gpt_oss;
mod granite;
mod granite_hybrid;
mod hf_config;
mod hf_quantisation;
mod hf_rope;
mod latent;
mod lfm2;
mod llama;
mod mistral;
mod mistral4;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;
mod qwen_vl;
mod smollm3;
#[cfg(test)]
mod tests;

use crate::decoder::{Layer, LayerLoader};
use crate::loader::damaged;
use crate::loader::gguf::{GgufFile, Value};
use crate::loader::tensors::{NameMap, Presence};
use crate::{Error, ModelConfig, Result};
use cresset_kernels::Ops;
use cresset_kernels::activation::Activation;
use cresset_kernels::rope::RopeStyle;
use gemma4::Gemma4Parts;
pub use hf_quantisation::quantisation;
use std::path::Path;

/// How files of one architecture become a decoder.
pub struct Architecture {
    /// Its name in GGUF files, if it has one, and how they are read.
    gguf: Option<(&'static str, fn(&mut gguf_config::GgufConfigKeys) -> Result<ArchSpec>)>,
    /// Its `model_type` in Hugging Face's configs.
    hf: (&'static str, fn(&mut hf_config::HfConfigKeys) -> Result<ArchSpec>),
}

pub static REGISTRY: [Architecture; 37] = [
    llama::LLAMA,
    mistral::MISTRAL,
    mistral::MINISTRAL,
    mistral::MINISTRAL3,
    mixtral::MIXTRAL,
    qwen2::QWEN2,
    qwen2_moe::QWEN2_MOE,
    qwen3::QWEN3,
    qwen3_moe::QWEN3_MOE,
    qwen3_5::QWEN3_5,
    qwen3_5::QWEN3_5_MOE,
    qwen3_next::QWEN3_NEXT,
    qwen_vl::QWEN2_VL,
    qwen_vl::QWEN2_VL_TEXT,
    qwen_vl::QWEN2_5_VL,
    qwen_vl::QWEN2_5_VL_TEXT,
    qwen_vl::QWEN3_VL,
    qwen_vl::QWEN3_VL_MOE,
    lfm2::LFM2,
    lfm2::LFM2_MOE,
    phi3::PHI3,
    smollm3::SMOLLM3,
    granite::GRANITE,
    granite::GRANITE_MOE,
    granite_hybrid::GRANITE_HYBRID,
    gemma2::GEMMA2,
    gemma3::GEMMA3,
    gemma4::GEMMA4,
    gemma4::GEMMA4_UNIFIED,
    gpt_oss::GPT_OSS,
    glm4_moe::GLM4_MOE,
    glm4_moe_lite::GLM4_MOE_LITE,
    deepseek::DEEPSEEK_V2,
    deepseek::DEEPSEEK_V3,
    mistral4::MISTRAL4,
    olmo2::OLMO2,
    olmo2::OLMO3,
];

/// A decoder's shape and how its layers are made, as read from an architecture's config.
pub struct ArchSpec {
    pub config: ModelConfig,
    pub options: LayerOptions,
}

/// The kinds of layers. Architectures whose layers have the same parts in the same order share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    Llama,
    Gemma2,
    Olmo2,
    Gemma4(Gemma4Parts),
}

/// The order of the values in a tensor that holds the matrices of all experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusedExperts {
    /// The matrices stand one below the other. Gate and up may share a tensor.
    Stacked,
    /// The same, or each matrix is transposed: the tensor's shape tells. Gate and up share one.
    EitherWay,
    /// Each matrix is transposed, unless it is in MXFP4. The rows of gate and of up take turns.
    TransposedInTurn,
}

/// Norms on Q and K before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorms {
    None,
    /// Each head is normed, all with one weight.
    EachHead,
    /// All heads are normed as one vector.
    AllHeads,
}

/// Loads the next layer of the loader's spec.
pub(crate) fn load_layer<O: Ops>(loader: &mut LayerLoader<O>) -> Option<Box<dyn Layer<O>>> {
    Some(match loader.spec.options.layer {
        LayerKind::Llama => Box::new(llama::LlamaLayer::load(loader)?),
        LayerKind::Gemma2 => Box::new(gemma2::Gemma2Layer::load(loader)?),
        LayerKind::Olmo2 => Box::new(olmo2::Olmo2Layer::load(loader)?),
        LayerKind::Gemma4(parts) => Box::new(gemma4::Gemma4Layer::load(loader, parts)?),
    })
}

/// Which parts the layers of an architecture have, and how their files name them.
#[derive(Clone, Copy, Debug)]
pub struct LayerOptions {
    pub layer: LayerKind,
    pub rope_style: RopeStyle,
    pub activation: Activation,
    /// Biases of Q, K and V.
    pub qkv_bias: Presence,
    /// Bias of the attention's output projection.
    pub output_bias: Presence,
    pub mlp_bias: Presence,
    pub qk_norm: QkNorms,
    /// Each head of V is normed, without weights.
    pub value_norm: bool,
    /// In layers without a window V is what K is before its norm.
    pub full_key_is_value: bool,
    /// A gate on the results of attention, whose rows follow those of each head of Q.
    pub attention_gate: bool,
    /// A score for each head that takes part in the softmax of attention and has no value.
    pub sinks: bool,
    /// Biases of experts and of their router.
    pub expert_bias: bool,
    /// A factor for each expert, by which its weights are multiplied.
    pub expert_factors: bool,
    pub fused_experts: FusedExperts,
    /// Layers behind the model's that predict further tokens. The first is that of the head which
    /// guesses tokens, where one is wanted; the others are not used.
    pub further_layers: usize,
    pub names: NameMap,
}

impl LayerOptions {
    /// Llama's layer with SwiGLU, no biases, no QK-norm.
    const fn plain(rope_style: RopeStyle) -> Self {
        Self {
            layer: LayerKind::Llama,
            rope_style,
            activation: Activation::Silu,
            qkv_bias: Presence::Never,
            output_bias: Presence::Never,
            mlp_bias: Presence::Never,
            qk_norm: QkNorms::None,
            value_norm: false,
            full_key_is_value: false,
            attention_gate: false,
            sinks: false,
            expert_bias: false,
            expert_factors: false,
            fused_experts: FusedExperts::Stacked,
            further_layers: 0,
            names: NameMap::USUAL,
        }
    }
}

impl ArchSpec {
    /// Refuses sizes that contradict each other.
    fn checked(self, path: &Path) -> Result<Self> {
        self.config.check().map_err(|what| damaged(path, &what))?;
        Ok(self)
    }
}

pub fn from_gguf(file: &GgufFile) -> Result<ArchSpec> {
    check_is_model(file)?;
    let mut keys = gguf_config::GgufConfigKeys::new(file)?;
    let known = || REGISTRY.iter().filter_map(|a| a.gguf);
    let found = known().find(|(name, _)| *name == keys.architecture());
    let (_, build) =
        found.ok_or_else(|| unknown(file.path(), keys.architecture(), known().map(|a| a.0)))?;
    let spec = build(&mut keys)?;
    keys.finish()?;
    spec.checked(file.path())
}

pub fn from_hf(path: &Path, json: &[u8]) -> Result<ArchSpec> {
    let mut keys = hf_config::HfConfigKeys::parse(path, json)?;
    let kind: String = keys.required("model_type")?;
    let known = || REGISTRY.iter().map(|a| a.hf);
    let found = known().find(|(name, _)| *name == kind);
    let (_, build) = found.ok_or_else(|| unknown(path, &kind, known().map(|a| a.0)))?;
    keys.fill_in(&kind);
    let spec = build(&mut keys)?;
    // How weights are quantised changes nothing else; only GPT-OSS has taken it out.
    hf_quantisation::take(&mut keys)?;
    keys.finish()?;
    spec.checked(path)
}

/// Refuses GGUF files that hold another thing than a language model, such as a LoRA adapter.
fn check_is_model(file: &GgufFile) -> Result<()> {
    let kind = file.metadata.get("general.type").and_then(Value::as_str).unwrap_or("model");
    let what = match kind {
        "model" => return Ok(()),
        "adapter" => "a LoRA adapter and no whole model: merge it into its base model first".into(),
        other => format!("of the kind {other:?} and no language model"),
    };
    Err(Error::Unsupported(format!("{} is {what} (general.type)", file.path().display())))
}

fn unknown<'a>(path: &Path, name: &str, known: impl Iterator<Item = &'a str>) -> Error {
    let known: Vec<_> = known.collect();
    let (path, known) = (path.display(), known.join(", "));
    Error::Unsupported(format!(
        "{path}: architecture {name:?} is not supported; this build has {known}"
    ))
}

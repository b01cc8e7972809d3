//! One file per architecture: how its config is read, and its layer. The tables `HF` and `GGUF`
//! list the names that it goes by.

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
mod hf_keys;
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
use crate::loader::SpecReader;
use crate::loader::gguf::{GgufFile, Value};
use crate::spec::{ArchSpec, LayerKind};
use crate::{Error, Result};
use cresset_kernels::Ops;
use gguf_config::GgufConfigKeys;
use hf_keys::HfConfigKeys;
pub use hf_quantisation::quantisation;
use std::path::Path;

/// How the config of an architecture is read, by the name that it has there.
type Readers<Reader> = [(&'static str, Reader)];
type HfReader = fn(&mut HfConfigKeys) -> Result<ArchSpec>;
type GgufReader = fn(&mut GgufConfigKeys) -> Result<ArchSpec>;

/// By the `model_type` of Hugging Face's configs. Of models that read more than text it is that of
/// their `text_config`; "qwen2_vl" and "qwen2_5_vl" also name older configs without one.
static HF: &Readers<HfReader> = &[
    ("llama", llama::from_hf),
    ("mistral", mistral::from_hf),
    ("ministral", mistral::ministral_from_hf),
    ("ministral3", mistral::ministral3_from_hf),
    ("mixtral", mixtral::from_hf),
    ("qwen2", qwen2::from_hf),
    ("qwen2_moe", qwen2_moe::from_hf),
    ("qwen3", qwen3::from_hf),
    ("qwen3_moe", qwen3_moe::from_hf),
    ("qwen3_5_text", qwen3_5::from_hf),
    ("qwen3_5_moe_text", qwen3_5::moe_from_hf),
    ("qwen3_next", qwen3_next::from_hf),
    ("qwen2_vl", qwen_vl::qwen2_from_hf),
    ("qwen2_vl_text", qwen_vl::qwen2_from_hf),
    ("qwen2_5_vl", qwen_vl::qwen2_from_hf),
    ("qwen2_5_vl_text", qwen_vl::qwen2_from_hf),
    ("qwen3_vl_text", qwen_vl::qwen3_from_hf),
    ("qwen3_vl_moe_text", qwen_vl::qwen3_moe_from_hf),
    ("lfm2", lfm2::from_hf),
    ("lfm2_moe", lfm2::moe_from_hf),
    ("phi3", phi3::from_hf),
    ("smollm3", smollm3::from_hf),
    ("granite", granite::from_hf),
    ("granitemoe", granite::moe_from_hf),
    ("granitemoehybrid", granite_hybrid::from_hf),
    ("gemma2", gemma2::from_hf),
    ("gemma3_text", gemma3::from_hf),
    ("gemma4_text", gemma4::from_hf),
    ("gemma4_unified_text", gemma4::unified_from_hf),
    ("gpt_oss", gpt_oss::from_hf),
    ("glm4_moe", glm4_moe::from_hf),
    ("glm4_moe_lite", glm4_moe_lite::from_hf),
    ("deepseek_v2", deepseek::v2_from_hf),
    ("deepseek_v3", deepseek::v3_from_hf),
    ("mistral4", mistral4::from_hf),
    ("olmo2", olmo2::from_hf),
    ("olmo3", olmo2::olmo3_from_hf),
];

/// By the `general.architecture` of GGUF files, where several families may share one: "llama" is
/// Mistral and Mixtral too, "deepseek2" GLM-4.7-Flash, "olmo2" OLMo 3.
static GGUF: &Readers<GgufReader> = &[
    ("llama", llama::from_gguf),
    ("mistral3", mistral::ministral3_from_gguf),
    ("qwen2", qwen2::from_gguf),
    ("qwen2moe", qwen2_moe::from_gguf),
    ("qwen3", qwen3::from_gguf),
    ("qwen3moe", qwen3_moe::from_gguf),
    ("qwen35", qwen3_5::from_gguf),
    ("qwen35moe", qwen3_5::moe_from_gguf),
    ("qwen3next", qwen3_next::from_gguf),
    ("qwen2vl", qwen_vl::qwen2_from_gguf),
    ("qwen3vl", qwen_vl::qwen3_from_gguf),
    ("qwen3vlmoe", qwen_vl::qwen3_moe_from_gguf),
    ("lfm2", lfm2::from_gguf),
    ("lfm2moe", lfm2::moe_from_gguf),
    ("phi3", phi3::from_gguf),
    ("smollm3", smollm3::from_gguf),
    ("granite", granite_hybrid::from_gguf),
    ("granitemoe", granite_hybrid::from_gguf),
    ("granitehybrid", granite_hybrid::from_gguf),
    ("gemma2", gemma2::from_gguf),
    ("gemma3", gemma3::from_gguf),
    ("gemma4", gemma4::from_gguf),
    ("gpt-oss", gpt_oss::from_gguf),
    ("glm4moe", glm4_moe::from_gguf),
    ("deepseek2", deepseek::from_gguf),
    ("mistral4", mistral4::from_gguf),
    ("olmo2", olmo2::from_gguf),
];

/// How the loader has a release's spec read.
pub(crate) const SPEC_READER: SpecReader = SpecReader {
    gguf: from_gguf,
    config: |path, json| Ok((from_hf(path, json)?, quantisation(path, json)?)),
};

/// Loads the next layer of the loader's spec.
pub(crate) fn load_layer<O: Ops>(loader: &mut LayerLoader<O>) -> Option<Box<dyn Layer<O>>> {
    Some(match loader.spec.options.layer {
        LayerKind::Llama => Box::new(llama::LlamaLayer::load(loader)?),
        LayerKind::Gemma2 => Box::new(gemma2::Gemma2Layer::load(loader)?),
        LayerKind::Olmo2 => Box::new(olmo2::Olmo2Layer::load(loader)?),
        LayerKind::Gemma4(parts) => Box::new(gemma4::Gemma4Layer::load(loader, parts)?),
    })
}

pub fn from_gguf(file: &GgufFile) -> Result<ArchSpec> {
    check_is_model(file)?;
    let mut keys = GgufConfigKeys::new(file)?;
    let read = find(GGUF, file.path(), keys.architecture())?;
    let spec = read(&mut keys)?;
    keys.finish()?;
    spec.checked(file.path())
}

pub fn from_hf(path: &Path, json: &[u8]) -> Result<ArchSpec> {
    let mut keys = HfConfigKeys::parse(path, json)?;
    let kind: String = keys.required("model_type")?;
    let read = find(HF, path, &kind)?;
    keys.fill_in(&kind);
    let spec = read(&mut keys)?;
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

/// The reader of an architecture, or an error that names all there are.
fn find<Reader: Copy>(readers: &Readers<Reader>, path: &Path, name: &str) -> Result<Reader> {
    let unknown = || {
        let known: Vec<_> = readers.iter().map(|(known, _)| *known).collect();
        let (path, known) = (path.display(), known.join(", "));
        Error::Unsupported(format!(
            "{path}: architecture {name:?} is not supported; this build has {known}"
        ))
    };
    readers.iter().find(|(known, _)| *known == name).map(|(_, read)| *read).ok_or_else(unknown)
}

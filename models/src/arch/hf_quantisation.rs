//! Reads from a Hugging Face `config.json` how weights are quantised (`quantization_config`), each
//! key of which must be understood. Where the files are checked for what they contain, keys that
//! repeat it are not compared: which matrices are quantised (`ignore`, `modules_to_not_convert`)
//! follows from their tensors.

use super::hf_keys::HfConfigKeys;
use crate::loader::quantised::{CodeLayout, Quantisation};
use crate::{Error, Result};
use serde_json::Value;

const KEY: &str = "quantization_config";
/// The method of GPT-OSS, whose blocks are known by their names.
const MXFP4: &str = "mxfp4";
/// Keys that say nothing about stored weights: how they were made, which programs compute them,
/// which matrices are meant, and with how many bits activations are computed elsewhere.
const UNUSED: &[&str] = &[
    "act_group_aware",
    "activation_scheme",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "dequantize",
    "desc_act",
    "disable_exllama",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "global_compression_ratio",
    "ignore",
    "ignored_layers",
    "input_activations",
    "kv_cache_scheme",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "modules_to_fuse",
    "modules_to_not_convert",
    "mse",
    "output_activations",
    "pad_token_id",
    "quantization_status",
    "quantizer",
    "static_groups",
    "sym",
    "targets",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "use_triton",
    "version",
];
/// Those of the weights of a group of compressed-tensors, beside what is read.
const UNUSED_OF_GROUP: &[&str] =
    &["actorder", "observer", "observer_kwargs", "scale_dtype", "symmetric", "zp_dtype"];

/// How the weights of a folder with this config are quantised, if they are.
pub fn quantisation(path: &std::path::Path, json: &[u8]) -> Result<Option<Quantisation>> {
    let mut keys = HfConfigKeys::parse(path, json)?;
    if keys.quantisation() == Some(MXFP4) { Ok(None) } else { take(&mut keys) }
}

/// Takes the object out and reads it.
pub(super) fn take(keys: &mut HfConfigKeys) -> Result<Option<Quantisation>> {
    // Earlier versions of compressed-tensors.
    let older = keys.object("compression_config")?;
    let Some(own) = keys.object(KEY)?.or(older) else { return Ok(None) };
    let mut own = MethodKeys { method: String::new(), keys: own };
    let method: Option<String> = own.keys.take("quant_method")?;
    own.method = method.unwrap_or_else(|| "an unnamed method".to_owned());
    let found = match own.method.as_str() {
        "fp8" => own.fp8(),
        "compressed-tensors" => own.compressed_tensors(),
        "gptq" => own.gptq(),
        "awq" => own.awq(),
        _ => Err(own.refused("which this build cannot read")),
    }?;
    own.finish(UNUSED)?;
    Ok(Some(found))
}

/// The settings of one method.
struct MethodKeys {
    method: String,
    keys: HfConfigKeys,
}

impl MethodKeys {
    fn refused(&self, why: &str) -> Error {
        self.keys.unsupported(&format!(
            "the weights are quantised by {} ({KEY}), {why}: use the release's bf16, f16 or f32 \
             files, or a GGUF file",
            self.method
        ))
    }

    fn finish(&self, unused: &[&str]) -> Result<()> {
        let unknown: Vec<&str> =
            self.keys.left().into_iter().filter(|key| !unused.contains(key)).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        Err(self.refused(&format!("with the unknown keys {}", unknown.join(", "))))
    }

    /// Takes a key out whose value must be one of some.
    fn only(&mut self, key: &str, known: &[&str]) -> Result<Option<String>> {
        let value: Option<String> = self.keys.take(key)?;
        let lower = value.map(|value| value.to_lowercase());
        match &lower {
            Some(value) if !known.contains(&value.as_str()) => {
                Err(self
                    .refused(&format!("with `{key}` {value:?} in place of {}", known.join(" or "))))
            }
            _ => Ok(lower),
        }
    }

    /// Refuses a key that is neither absent, nor null, nor false, nor empty.
    fn none(&mut self, key: &str) -> Result<()> {
        match self.keys.take::<Value>(key)? {
            None | Some(Value::Bool(false)) => Ok(()),
            Some(Value::Object(values)) if values.is_empty() => Ok(()),
            Some(_) => Err(self.refused(&format!("with `{key}`, which this build does not have"))),
        }
    }

    /// The bits of a code, which must be among those known.
    fn bits(&mut self, key: &str, known: &[usize]) -> Result<usize> {
        let bits = self.keys.required(key)?;
        if known.contains(&bits) {
            return Ok(bits);
        }
        Err(self.refused(&format!("with `{key}` {bits}, of which this build has {known:?}")))
    }

    /// The columns of a group; `None` are all.
    fn group(&mut self) -> Result<Option<usize>> {
        match self.keys.take::<i64>("group_size")? {
            None | Some(-1) => Ok(None),
            Some(group) => match usize::try_from(group) {
                Ok(group) if group > 0 => Ok(Some(group)),
                _ => Err(self.keys.bad("`group_size` must be positive or -1")),
            },
        }
    }

    /// The rows and columns of a block.
    fn block(&mut self, key: &str) -> Result<Option<[usize; 2]>> {
        let block = self.keys.take::<[usize; 2]>(key)?;
        if block.is_some_and(|sizes| sizes.contains(&0)) {
            return Err(self.keys.bad(&format!("`{key}` must be positive")));
        }
        Ok(block)
    }

    /// Floats of eight bits, as DeepSeek, Qwen and Mistral publish them.
    fn fp8(&mut self) -> Result<Quantisation> {
        self.only("fmt", &["e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"])?;
        self.only("scale_fmt", &["ue8m0", "float"])?;
        let block = self.block("weight_block_size")?;
        Ok(Quantisation { layout: CodeLayout::Bytes, bits: 8, block, group: None })
    }

    /// GPTQ, in the first and the second version of its format. Frantar et al. 2023.
    fn gptq(&mut self) -> Result<Quantisation> {
        let bits = self.bits("bits", &[4, 8])?;
        self.none("is_marlin_format")?;
        self.none("dynamic")?;
        self.only("pack_dtype", &["int32"])?;
        let versions = ["gptq", "gptq_v2"];
        let older = self.only("checkpoint_format", &versions)?;
        let version = self.only("format", &versions)?.or(older);
        let zeros_less_one = version.as_deref() != Some("gptq_v2");
        let layout = CodeLayout::Gptq { zeros_less_one };
        Ok(Quantisation { layout, bits, block: None, group: self.group()? })
    }

    /// AWQ. Lin et al. 2024.
    fn awq(&mut self) -> Result<Quantisation> {
        let bits = self.bits("bits", &[4])?;
        self.only("version", &["gemm"])?;
        self.only("format", &["gemm"])?;
        if self.keys.take("zero_point")? == Some(false) {
            return Err(self.refused("with `zero_point` false, which this build does not have"));
        }
        let group = self.group()?;
        Ok(Quantisation { layout: CodeLayout::Awq, bits, block: None, group })
    }

    /// What vLLM's tools write: groups of modules, all of which must be in one format here.
    fn compressed_tensors(&mut self) -> Result<Quantisation> {
        self.none("transform_config")?;
        self.sparsity()?;
        let format = self.keys.take::<String>("format")?;
        let mut groups = self.keys.required_object("config_groups")?;
        let mut found: Option<Quantisation> = None;
        let names: Vec<String> = groups.left().into_iter().map(str::to_owned).collect();
        for name in names {
            let own = self.group_of(groups.required_object(&name)?, format.as_deref())?;
            if found.is_some_and(|other| other != own) {
                return Err(self.refused("with several formats (`config_groups`)"));
            }
            found = Some(own);
        }
        found.ok_or_else(|| self.keys.bad("config_groups is empty"))
    }

    fn sparsity(&mut self) -> Result<()> {
        let Some(mut sparsity) = self.keys.object("sparsity_config")? else { return Ok(()) };
        match sparsity.take::<String>("format")?.as_deref() {
            Some("dense") => Ok(()),
            None if sparsity.left().is_empty() => Ok(()),
            _ => Err(self.refused("with `sparsity_config`, which this build does not have")),
        }
    }

    /// A group of `config_groups`, whose files have a `format` unless it has one of its own.
    fn group_of(&self, mut group: HfConfigKeys, format: Option<&str>) -> Result<Quantisation> {
        let own: Option<String> = group.take("format")?;
        let weights = group.required_object("weights")?;
        let with = |keys| Self { method: self.method.clone(), keys };
        let mut weights = with(weights);
        let found = weights.of_group(own.as_deref().or(format).unwrap_or("absent"))?;
        weights.finish(UNUSED_OF_GROUP)?;
        with(group).finish(UNUSED)?;
        Ok(found)
    }

    /// The weights of a group.
    fn of_group(&mut self, format: &str) -> Result<Quantisation> {
        let is_float = self.only("type", &["int", "float"])?.as_deref() == Some("float");
        let bits = self.bits("num_bits", if is_float { &[8] } else { &[4, 8] })?;
        self.none("dynamic")?;
        let layout = match (format, is_float) {
            ("pack-quantized", false) => CodeLayout::Rows,
            ("float-quantized", true) | ("int-quantized", false) | ("naive-quantized", _) => {
                CodeLayout::Bytes
            }
            _ => return Err(self.refused(&format!("with `format` {format:?}"))),
        };
        let (block, group) = self.scale_sizes()?;
        Ok(Quantisation { layout, bits, block, group })
    }

    /// The rows and columns of a block that has a scale, or the columns of a group.
    fn scale_sizes(&mut self) -> Result<(Option<[usize; 2]>, Option<usize>)> {
        let strategy = self.only("strategy", &["tensor", "channel", "group", "block"])?;
        let (block, group) = (self.block("block_structure")?, self.group()?);
        let missing = |key: &str| self.keys.bad(&format!("{key} is missing"));
        Ok(match strategy.as_deref() {
            Some("block") => (Some(block.ok_or_else(|| missing("block_structure"))?), None),
            Some("group") => (None, Some(group.ok_or_else(|| missing("group_size"))?)),
            _ => (None, None),
        })
    }
}

//! Reads a decoder's shape from GGUF metadata: `<architecture>.*` keys, each of which must be
//! understood.

use crate::config::{MixtureConfig, RopeConfig, RopeScaling, RouterScoring, SharedConfig, Yarn};
use crate::error::damaged;
use crate::loader::gguf::{GgufFile, Value};
use crate::loader::names::LONG_FACTORS;
use crate::{Error, ModelConfig, Result};
use cresset_kernels::gpu::Kind;
use std::collections::BTreeSet;

/// Keys that say nothing about the computation.
const IGNORED: [&str; 3] =
    ["tensor_data_layout", "rope.scaling.finetuned", "attention.value_length_swa"];

/// The numbers of the functions by which experts are routed.
pub(super) const SOFTMAX: usize = 1;
pub(super) const SIGMOID: usize = 2;

pub(super) struct GgufConfigKeys<'a> {
    file: &'a GgufFile,
    architecture: String,
    used: BTreeSet<String>,
}

impl<'a> GgufConfigKeys<'a> {
    pub(super) fn new(file: &'a GgufFile) -> Result<Self> {
        let name = file.metadata.get("general.architecture").and_then(Value::as_str);
        let name = name.ok_or_else(|| damaged(file.path(), "general.architecture is missing"))?;
        Ok(Self { file, architecture: name.to_owned(), used: BTreeSet::new() })
    }

    pub(super) fn architecture(&self) -> &str {
        &self.architecture
    }

    fn get<T>(&mut self, key: &str, convert: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        let key = format!("{}.{key}", self.architecture);
        let Some(value) = self.file.metadata.get(&key) else { return Ok(None) };
        let converted = convert(value).ok_or_else(|| self.bad(&format!("{key} is {value:?}")))?;
        self.used.insert(key);
        Ok(Some(converted))
    }

    pub(super) fn size(&mut self, key: &str) -> Result<Option<usize>> {
        self.get(key, |v| v.as_usize().filter(|v| *v > 0 && u32::try_from(*v).is_ok()))
    }

    /// Reads a size that may be zero.
    pub(super) fn count(&mut self, key: &str) -> Result<Option<usize>> {
        self.get(key, Value::as_usize)
    }

    /// A size without which the file is damaged.
    pub(super) fn needed(&mut self, key: &str) -> Result<usize> {
        let found = self.size(key)?;
        found.ok_or_else(|| self.bad(&format!("{}.{key} is missing", self.architecture)))
    }

    pub(super) fn float(&mut self, key: &str) -> Result<Option<f32>> {
        self.get(key, |v| v.as_f32().filter(|v| v.is_finite() && *v > 0.0))
    }

    pub(super) fn flag(&mut self, key: &str) -> Result<Option<bool>> {
        self.get(key, Value::as_bool)
    }

    /// A truth for each layer.
    pub(super) fn flags(&mut self, key: &str) -> Result<Option<Vec<bool>>> {
        self.get(key, |value| match value {
            Value::Array(flags) => flags.iter().map(Value::as_bool).collect(),
            _ => None,
        })
    }

    /// A number for each layer, or one for all.
    pub(super) fn counts(&mut self, key: &str) -> Result<Option<Vec<usize>>> {
        self.get(key, |value| match value {
            Value::Array(counts) => counts.iter().map(Value::as_usize).collect(),
            one => one.as_usize().map(|count| vec![count]),
        })
    }

    /// Refuses numbers of layers, if there is one for each, of which not all that `concerns` holds
    /// for are `expected`.
    pub(super) fn check_alike(
        &self,
        key: &str,
        counts: &[usize],
        expected: usize,
        concerns: impl Fn(usize) -> bool,
    ) -> Result<()> {
        let mut own = (0..).zip(counts).filter(|(layer, _)| concerns(*layer));
        match own.find(|(_, count)| counts.len() > 1 && **count != expected) {
            None => Ok(()),
            Some((layer, count)) => Err(self.unsupported(&format!(
                "{key} is {count} in layer {layer}, where layers alike have {expected}"
            ))),
        }
    }

    /// How many pairs of each head are rotated by each axis of a position.
    pub(super) fn sections(&mut self, key: &str) -> Result<Option<Vec<usize>>> {
        self.get(key, |value| match value {
            Value::Array(sizes) => sizes.iter().map(Value::as_usize).collect(),
            _ => None,
        })
    }

    pub(super) fn unsupported(&self, what: &str) -> Error {
        Error::Unsupported(format!("{}: {what}", self.file.path().display()))
    }

    pub(super) fn bad(&self, what: &str) -> Error {
        damaged(self.file.path(), what)
    }

    /// Reads what every decoder has. The heads of K and of V must have one size.
    pub(super) fn decoder(&mut self) -> Result<ModelConfig> {
        let kv_heads = self.size("attention.head_count_kv")?;
        let width = self.mlp_width()?;
        self.decoder_with(kv_heads, width)
    }

    /// Reads the same of a decoder whose layers have KV heads, equally many, or none. Says of each
    /// layer whether it has none.
    pub(super) fn decoder_with_gaps(&mut self) -> Result<(ModelConfig, Vec<bool>)> {
        let counts = self.counts("attention.head_count_kv")?.unwrap_or_default();
        let most = counts.iter().copied().max().filter(|most| *most > 0);
        if counts.iter().any(|count| *count > 0 && Some(*count) != most) {
            return Err(self.unsupported("layers have different numbers of KV heads"));
        }
        let width = self.mlp_width()?;
        let config = self.decoder_with(most, width)?;
        let layers = config.layers;
        let gap = |layer: usize| counts.get(layer).is_some_and(|count| *count == 0);
        if counts.len() > 1 && counts.len() != layers {
            return Err(self.bad("attention.head_count_kv does not have a number for each layer"));
        }
        Ok((config, (0..layers).map(gap).collect()))
    }

    /// The same with numbers that may differ from layer to layer.
    pub(super) fn decoder_with(
        &mut self,
        kv_heads: Option<usize>,
        mlp_width: usize,
    ) -> Result<ModelConfig> {
        let (hidden_size, heads) =
            (self.needed("embedding_length")?, self.needed("attention.head_count")?);
        let head_dim = self.size("attention.key_length")?.unwrap_or(hidden_size / heads);
        if self.size("attention.value_length")?.is_some_and(|v| v != head_dim) {
            return Err(Error::Unsupported(
                "keys and values of different sizes are not supported".into(),
            ));
        }
        self.decoder_of(kv_heads.unwrap_or(heads), head_dim, mlp_width)
    }

    /// Reads a decoder whose heads have this size.
    pub(super) fn decoder_of(
        &mut self,
        kv_heads: usize,
        head_dim: usize,
        intermediate_size: usize,
    ) -> Result<ModelConfig> {
        let epsilon = self.float("attention.layer_norm_rms_epsilon")?;
        let config = ModelConfig {
            vocab_size: self.vocabulary()?,
            hidden_size: self.needed("embedding_length")?,
            intermediate_size,
            layers: self.needed("block_count")?,
            heads: self.needed("attention.head_count")?,
            kv_heads,
            head_dim,
            rms_norm_eps: epsilon
                .ok_or_else(|| self.bad("attention.layer_norm_rms_epsilon is missing"))?,
            rope: self.rope(head_dim)?,
            max_positions: self.needed("context_length")?,
            sliding: None,
            recurrent: None,
            mixture: None,
            shared_kv_layers: 0,
            latent: None,
            query_growth: None,
            unrotated: Vec::new(),
            attention_scale: 1.0 / (head_dim as f32).sqrt(),
            kv_kind: Kind::F32,
            attention_softcap: None,
            logits_softcap: None,
            embedding_scale: 1.0,
            logits_scale: 1.0,
            tied_embeddings: !self.file.tensors.contains_key("output.weight"),
        };
        // The sizes are checked before anything is allocated by them.
        config.check().map_err(|what| self.bad(&what))?;
        Ok(config)
    }

    /// Files whose layers all have experts may state the width of those alone.
    pub(super) fn mlp_width(&mut self) -> Result<usize> {
        let all = "feed_forward_length";
        let of_experts = "expert_feed_forward_length";
        self.needed(if !self.has(all) && self.has(of_experts) { of_experts } else { all })
    }

    /// Whether the file has a key.
    pub(super) fn has(&self, key: &str) -> bool {
        self.file.metadata.contains_key(&format!("{}.{key}", self.architecture))
    }

    /// Reads the settings of the experts, which every layer has. `normalise` says whether their
    /// weights are divided by their sum if the file does not tell.
    pub(super) fn mixture(
        &mut self,
        config: &ModelConfig,
        normalise: bool,
    ) -> Result<MixtureConfig> {
        let width = self.size("expert_feed_forward_length")?;
        Ok(MixtureConfig {
            experts: self.needed("expert_count")?,
            chosen: self.needed("expert_used_count")?,
            intermediate_size: width.unwrap_or(config.intermediate_size),
            scoring: RouterScoring::Softmax,
            normalise: self.get("expert_weights_norm", Value::as_bool)?.unwrap_or(normalise),
            scale: 1.0,
            shared: self
                .size("expert_shared_feed_forward_length")?
                .map(|width| SharedConfig { width, gated: true }),
            layers: vec![true; config.layers],
        })
    }

    /// Reads the settings of experts that are routed by sigmoids, behind the first layers.
    pub(super) fn sigmoid_mixture(&mut self, config: &ModelConfig) -> Result<MixtureConfig> {
        let function = self.needed("expert_gating_func")?;
        self.later_mixture(config, function, &[SIGMOID], true)
    }

    /// Reads the settings of experts behind the first layers, which are routed by one of some
    /// `supported` functions. `normalise` is as in [`Self::mixture`].
    pub(super) fn later_mixture(
        &mut self,
        config: &ModelConfig,
        function: usize,
        supported: &[usize],
        normalise: bool,
    ) -> Result<MixtureConfig> {
        let scoring = self.scoring(function, supported)?;
        let dense = self.count("leading_dense_block_count")?.unwrap_or(0);
        let mixture = self.mixture(config, normalise)?;
        let shared = self.count("expert_shared_count")?.filter(|count| *count > 0);
        Ok(MixtureConfig {
            scoring,
            scale: self.float("expert_weights_scale")?.unwrap_or(1.0),
            shared: shared.map(|count| SharedConfig {
                width: count.saturating_mul(mixture.intermediate_size),
                gated: false,
            }),
            layers: (0..config.layers).map(|layer| layer >= dense).collect(),
            ..mixture
        })
    }

    /// The scoring that the number of a gating function stands for. It must be a supported one.
    fn scoring(&mut self, function: usize, supported: &[usize]) -> Result<RouterScoring> {
        if !supported.contains(&function) {
            return Err(self.unsupported(&format!(
                "experts are routed by the function {function} (expert_gating_func), where \
                 {supported:?} are supported"
            )));
        }
        let groups = self.size("expert_group_count")?.unwrap_or(1);
        let kept = self.size("expert_group_used_count")?.unwrap_or(1);
        Ok(match function {
            SIGMOID => RouterScoring::Sigmoid { groups, kept },
            _ if groups > 1 => RouterScoring::GroupedSoftmax { groups, kept },
            _ => RouterScoring::Softmax,
        })
    }

    /// Takes the layers that predict further tokens off the number of layers, and returns how many
    /// they are.
    pub(super) fn further_layers(&mut self, config: &mut ModelConfig) -> Result<usize> {
        let further = self.count("nextn_predict_layers")?.unwrap_or(0);
        if further >= config.layers {
            return Err(self.bad("nextn_predict_layers leaves no layer"));
        }
        config.layers -= further;
        Ok(further)
    }

    pub(super) fn has_tensor(&self, name: &str) -> bool {
        self.file.tensors.contains_key(name)
    }

    /// Whether the name of any tensor ends like this.
    pub(super) fn has_tensor_ending(&self, end: &str) -> bool {
        self.file.tensors.keys().any(|name| name.ends_with(end))
    }

    /// Which layers have a sliding window: the file lists them one by one, or all but every n-th
    /// have it.
    pub(super) fn sliding_layers(&mut self, layers: usize, pattern: usize) -> Result<Vec<bool>> {
        let key = "attention.sliding_window_pattern";
        let flags = |v: &Value| match v {
            Value::Array(flags) => flags.iter().map(Value::as_bool).collect(),
            _ => Some(Vec::new()),
        };
        let listed: Vec<bool> = self.get(key, flags)?.unwrap_or_default();
        if !listed.is_empty() {
            return Ok(listed);
        }
        let pattern = self.size(key)?.unwrap_or(pattern);
        Ok((0..layers).map(|layer| (layer + 1) % pattern != 0).collect())
    }

    fn vocabulary(&mut self) -> Result<usize> {
        let stored =
            self.file.tensors.get("token_embd.weight").and_then(|t| t.shape.first().copied());
        let stated = self.size("vocab_size")?;
        stated.or(stored).ok_or_else(|| self.bad("token_embd.weight is missing"))
    }

    fn rope(&mut self, head_dim: usize) -> Result<RopeConfig> {
        Ok(RopeConfig {
            theta: self.float("rope.freq_base")?.unwrap_or(10_000.0),
            rotary_dim: self.size("rope.dimension_count")?.unwrap_or(head_dim),
            scaling: self.rope_scaling()?,
        })
    }

    fn yarn(&mut self, factor: f32) -> Result<Yarn> {
        let original = self.needed("rope.scaling.original_context_length")?;
        let attention_factor = self.float("rope.scaling.yarn_attn_factor")?;
        Ok(Yarn {
            factor,
            attention_factor: attention_factor.unwrap_or(0.1 * factor.max(1.0).ln() + 1.0),
            beta_fast: self.float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: self.float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            original_max_positions: original,
            truncate: true,
            mscale_all_dim: 0.0,
        })
    }

    /// LongRoPE, whose factors are tensors: until they are read, all are one.
    pub(super) fn long_rope(&mut self, config: &ModelConfig) -> Result<Option<RopeScaling>> {
        let original = self.size("rope.scaling.original_context_length")?;
        let attention_factor = self.float("rope.scaling.attn_factor")?;
        if !self.file.tensors.contains_key(LONG_FACTORS) {
            return Ok(None);
        }
        let original = original.unwrap_or(config.max_positions);
        let longer = (config.max_positions as f32 / original as f32).max(1.0);
        let usual = (1.0 + longer.ln() / (original as f32).ln()).sqrt();
        let ones = vec![1.0; config.rope.rotary_dim / 2];
        Ok(Some(RopeScaling::LongRope {
            short: ones.clone(),
            long: ones,
            attention_factor: attention_factor.unwrap_or(usual),
            original_max_positions: original,
        }))
    }

    /// Llama 3's scaling is missing here because the converter bakes it into `rope_freqs.weight`.
    fn rope_scaling(&mut self) -> Result<RopeScaling> {
        let kind = self.get("rope.scaling.type", |v| v.as_str().map(str::to_owned))?;
        let factor = self.float("rope.scaling.factor")?.or(self.float("rope.scale_linear")?);
        match (kind.as_deref(), factor) {
            (None | Some("none"), None) => Ok(RopeScaling::None),
            (None | Some("linear"), Some(factor)) => Ok(RopeScaling::Linear { factor }),
            (Some("yarn"), Some(factor)) => Ok(RopeScaling::Yarn(self.yarn(factor)?)),
            (Some(kind), _) => Err(Error::Unsupported(format!(
                "{}: RoPE scaling {kind:?} with factor {factor:?} is not supported",
                self.file.path().display()
            ))),
        }
    }

    /// Refuses keys of the architecture that nothing asked for: they may change the computation.
    pub(super) fn finish(self) -> Result<()> {
        let prefix = format!("{}.", self.architecture);
        let ignored =
            |key: &str| key.strip_prefix(&prefix).is_some_and(|rest| IGNORED.contains(&rest));
        let unknown = self
            .file
            .metadata
            .keys()
            .filter(|k| k.starts_with(&prefix) && !self.used.contains(*k) && !ignored(k));
        let unknown: Vec<&str> = unknown.map(String::as_str).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        Err(Error::Unsupported(format!(
            "{}: this build does not know the metadata {}",
            self.file.path().display(),
            unknown.join(", ")
        )))
    }
}

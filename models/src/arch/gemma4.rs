//! Gemma 4: Gemma 3's four norms around sub-layers, with V normed too, heads of other sizes in
//! layers with a window and in those without, and a factor on the residual stream behind each
//! layer. The smaller models have inputs of each token for every layer and layers that read the K
//! and V of earlier ones; another has experts beside its MLP. Google 2026, "Gemma 4".

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::hf_rope;
use crate::blocks::attention::SelfAttention;
use crate::blocks::mixture::Mixture;
use crate::blocks::mlp::{self, Mlp};
use crate::config::{KvHeads, MixtureConfig, RopeConfig, RopeScaling, RouterScoring, Sliding};
use crate::decoder::{Activations, Layer, LayerLoader, LayerStep, Stream};
use crate::loader::tensors::Optional;
use crate::spec::{ArchSpec, Gemma4Parts, LayerKind, LayerOptions, NameMap, Presence, QkNorms};
use crate::{ModelConfig, Result};
use cresset_kernels::Ops;
use cresset_kernels::activation::Activation;
use cresset_kernels::embedding::GatherArgs;
use cresset_kernels::factors::{LayerInputArgs, ScaleArgs};
use cresset_kernels::norm::AddNormedArgs;
use cresset_kernels::rope::RopeStyle;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::f32::consts::FRAC_1_SQRT_2;

const OPTIONS: LayerOptions = LayerOptions {
    activation: Activation::GeluTanh,
    layer: LayerKind::Gemma4(Gemma4Parts { input_width: 0, input_rows: 0, double_wide: false }),
    qk_norm: QkNorms::EachHead,
    value_norm: true,
    expert_factors: true,
    names: NameMap {
        gguf: &[
            ("model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
            ("model.per_layer_model_projection.weight", "per_layer_model_proj.weight"),
            ("model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
            ("post_attention_layernorm", "post_attention_norm"),
            ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
            ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
            ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
            ("router.scale", "ffn_gate_inp.scale"),
            ("router.per_expert_scale", "ffn_down_exps.scale"),
            ("mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight"),
            ("mlp.experts.down_proj", "ffn_down_exps.weight"),
            ("per_layer_input_gate", "inp_gate"),
            ("per_layer_projection", "proj"),
            ("post_per_layer_input_norm", "post_norm"),
            ("layer_scalar", "layer_output_scale.weight"),
        ],
        hf: &[("mlp.gate.weight", "router.proj.weight"), ("mlp.experts.", "experts.")],
        ..NameMap::USUAL
    },
    ..LayerOptions::plain(RopeStyle::Neox)
};

/// The values of settings that a config does not have.
const PATTERN: usize = 6;
const WINDOW: usize = 512;
const UNIFIED_WINDOW: usize = 1024;
const HEAD_DIM: usize = 256;
const FULL_HEAD_DIM: usize = 512;
const INPUT_WIDTH: usize = 256;
const INPUT_ROWS: usize = 262_144;
const THETA: f32 = 1_000_000.0;
const SLIDING_THETA: f32 = 10_000.0;

pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let numbers = LayerNumbers {
        kv_heads: keys.counts("attention.head_count_kv")?.unwrap_or_default(),
        widths: keys.counts("feed_forward_length")?.unwrap_or_default(),
    };
    let layers = keys.needed("block_count")?;
    let slides = keys.sliding_layers(layers, PATTERN)?;
    let width = numbers.widths.first().copied().unwrap_or_default();
    let mut config = keys.decoder_with(numbers.kv_heads_of(&slides, false), width)?;
    config.shared_kv_layers = keys.count("attention.shared_kv_layers")?.unwrap_or(0);
    config.sliding = Some(sliding_in_gguf(keys, &config, &numbers, slides)?);
    config.logits_softcap = keys.float("final_logit_softcapping")?;
    if keys.has("expert_count") {
        config.mixture = Some(keys.mixture(&config, true)?);
    }
    let parts = Gemma4Parts {
        input_width: keys.count("embedding_length_per_layer_input")?.unwrap_or(0),
        input_rows: config.vocab_size,
        double_wide: numbers.are_double_wide(keys, &config)?,
    };
    let own_value = |layer| keys.has_tensor(&format!("blk.{layer}.attn_v.weight"));
    let full_key_is_value = !full_layers(&config).all(own_value);
    Ok(spec(config, parts, full_key_is_value, OPTIONS.activation))
}

/// The numbers that a GGUF file gives for each layer, or once for all layers.
struct LayerNumbers {
    kv_heads: Vec<usize>,
    /// The widths of MLPs.
    widths: Vec<usize>,
}

impl LayerNumbers {
    /// The KV heads of the layers that have a window, or of those that have none.
    fn kv_heads_of(&self, slides: &[bool], kind: bool) -> Option<usize> {
        let layer = slides.iter().position(|slides| *slides == kind).unwrap_or(0);
        self.kv_heads.get(layer).or(self.kv_heads.first()).copied()
    }

    /// Whether layers that read the K and V of another have an MLP of twice the width. All others
    /// must have MLPs of one width.
    fn are_double_wide(&self, keys: &GgufConfigKeys, config: &ModelConfig) -> Result<bool> {
        let first = config.layers.saturating_sub(config.shared_kv_layers);
        let width = config.intermediate_size;
        let are = self.widths.last().is_some_and(|last| *last != width);
        for (wide, width) in [(false, width), (true, 2 * width)] {
            let concerns = |layer| (are && layer >= first) == wide;
            keys.check_alike("feed_forward_length", &self.widths, width, concerns)?;
        }
        Ok(are)
    }
}

/// The layers with a window, and that the layers of each kind have equally many KV heads.
fn sliding_in_gguf(
    keys: &mut GgufConfigKeys,
    config: &ModelConfig,
    numbers: &LayerNumbers,
    layers: Vec<bool>,
) -> Result<Sliding> {
    let heads = KvHeads {
        count: numbers.kv_heads_of(&layers, true).unwrap_or(config.kv_heads),
        dim: keys.size("attention.key_length_swa")?.unwrap_or(config.head_dim),
    };
    for (kind, count) in [(false, config.kv_heads), (true, heads.count)] {
        let concerns = |layer| layers.get(layer) == Some(&kind);
        keys.check_alike("attention.head_count_kv", &numbers.kv_heads, count, concerns)?;
    }
    let rope = RopeConfig {
        theta: keys.float("rope.freq_base_swa")?.unwrap_or(SLIDING_THETA),
        rotary_dim: keys.size("rope.dimension_count_swa")?.unwrap_or(heads.dim),
        scaling: RopeScaling::None,
    };
    let window = keys.needed("attention.sliding_window")?;
    Ok(Sliding { window, layers, rope: Some(rope), heads: Some(heads) })
}

/// The same for both kinds of files: adds the settings that they do not state.
fn spec(
    mut config: ModelConfig,
    parts: Gemma4Parts,
    full_key_is_value: bool,
    activation: Activation,
) -> ArchSpec {
    config.attention_scale = 1.0;
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    let layer = LayerKind::Gemma4(parts);
    ArchSpec { config, options: LayerOptions { layer, activation, full_key_is_value, ..OPTIONS } }
}

fn slides(config: &ModelConfig, layer: usize) -> bool {
    config.sliding.as_ref().is_some_and(|sliding| sliding.layers.get(layer) == Some(&true))
}

/// The layers with a K of their own and without a window.
fn full_layers(config: &ModelConfig) -> impl Iterator<Item = usize> {
    let own = config.layers.saturating_sub(config.shared_kv_layers);
    (0..own).filter(|layer| !slides(config, *layer))
}

/// The rotations of a config that does not have any.
fn usual_ropes() -> Value {
    json!({
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default"},
    })
}

/// The settings of a layer that differ from the model's.
#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct LayerOverride {
    head_dim: Option<usize>,
    num_key_value_heads: Option<usize>,
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let heads = KvHeads {
        count: keys.required("num_key_value_heads")?,
        dim: keys.take("head_dim")?.unwrap_or(HEAD_DIM),
    };
    let full_key_is_value = keys.flag("attention_k_eq_v")?;
    let overrides = keys.take::<BTreeMap<usize, LayerOverride>>("per_layer_config")?;
    let full = full_heads(keys, heads, full_key_is_value, overrides.as_ref())?;
    keys.default("head_dim", full.dim);
    keys.default("num_key_value_heads", full.count);
    keys.default("rope_parameters", usual_ropes());
    let ropes = hf_rope::by_kind(keys, [THETA, SLIDING_THETA])?;
    let mut config = keys.decoder(true)?;
    let rope = hf_rope::apply_by_kind(ropes, &mut config)?;
    let rope = RopeConfig { rotary_dim: heads.dim, ..rope };
    config.sliding = sliding_in_hf(keys, &config, heads, rope)?;
    // None of them differs where the heads of all layers are alike.
    if let Some(overrides) = overrides.filter(|overrides| !overrides.is_empty()) {
        let full = (0..config.layers).filter(|layer| !slides(&config, *layer));
        if !full.eq(overrides.into_keys()) {
            return Err(keys.bad("`per_layer_config` does not name the layers without a window"));
        }
    }
    config.shared_kv_layers = keys.take("num_kv_shared_layers")?.unwrap_or(0);
    config.logits_softcap = keys.take("final_logit_softcapping")?;
    config.mixture = mixture(keys, &config)?;
    let towers = keys.take::<String>("use_bidirectional_attention")?;
    if towers.is_some_and(|kind| kind != "vision") {
        return Err(keys.unsupported("`use_bidirectional_attention` of text is not supported"));
    }
    let activation = keys.activation("hidden_activation", OPTIONS.activation)?;
    let bias = Presence::when(keys.flag("attention_bias")?);
    let parts = parts_in_hf(keys, config.vocab_size)?;
    let ArchSpec { config, options } = spec(config, parts, full_key_is_value, activation);
    let options = LayerOptions { qkv_bias: bias, output_bias: bias, ..options };
    Ok(ArchSpec { config, options })
}

fn sliding_in_hf(
    keys: &mut HfConfigKeys,
    config: &ModelConfig,
    heads: KvHeads,
    rope: RopeConfig,
) -> Result<Option<Sliding>> {
    let window = keys.window(WINDOW)?;
    let found = keys.sliding(config, window, |layer| (layer + 1) % PATTERN != 0)?;
    Ok(found.map(|mut sliding| {
        // The reference gives the last layer no window, whatever the config says.
        if let Some(last) = sliding.layers.last_mut() {
            *last = false;
        }
        Sliding { rope: Some(rope), heads: Some(heads), ..sliding }
    }))
}

fn parts_in_hf(keys: &mut HfConfigKeys, vocabulary: usize) -> Result<Gemma4Parts> {
    let parts = Gemma4Parts {
        input_width: keys.take("hidden_size_per_layer_input")?.unwrap_or(INPUT_WIDTH),
        input_rows: keys.take("vocab_size_per_layer_input")?.unwrap_or(INPUT_ROWS),
        double_wide: keys.flag("use_double_wide_mlp")?,
    };
    if parts.input_width > 0 && parts.input_rows < vocabulary {
        return Err(keys.bad("`vocab_size_per_layer_input` is below `vocab_size`"));
    }
    Ok(parts)
}

pub(super) fn unified_from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    keys.default("sliding_window", UNIFIED_WINDOW);
    keys.default("hidden_size_per_layer_input", 0);
    from_hf(keys)
}

/// The heads of layers without a window, in the newer layout those of each layer, which must be
/// alike.
fn full_heads(
    keys: &mut HfConfigKeys,
    sliding: KvHeads,
    key_is_value: bool,
    overrides: Option<&BTreeMap<usize, LayerOverride>>,
) -> Result<KvHeads> {
    let (dim, count) = (keys.take("global_head_dim")?, keys.take("num_global_key_value_heads")?);
    let older = KvHeads {
        count: count.filter(|_| key_is_value).unwrap_or(sliding.count),
        dim: dim.unwrap_or(FULL_HEAD_DIM),
    };
    let Some(overrides) = overrides else { return Ok(older) };
    let mut all = overrides.values();
    let Some(first) = all.next() else { return Ok(sliding) };
    if all.any(|other| other != first) {
        return Err(keys.unsupported("`per_layer_config` gives layers different heads"));
    }
    Ok(KvHeads {
        count: first.num_key_value_heads.unwrap_or(sliding.count),
        dim: first.head_dim.unwrap_or(sliding.dim),
    })
}

fn mixture(keys: &mut HfConfigKeys, config: &ModelConfig) -> Result<Option<MixtureConfig>> {
    let sizes = [keys.take("num_experts")?, keys.take("top_k_experts")?];
    let width = keys.take("moe_intermediate_size")?;
    if !keys.flag("enable_moe_block")? {
        return Ok(None);
    }
    let ([Some(experts), Some(chosen)], Some(intermediate_size)) = (sizes, width) else {
        return Err(keys.bad("num_experts, top_k_experts or moe_intermediate_size is missing"));
    };
    Ok(Some(MixtureConfig {
        experts,
        chosen,
        intermediate_size,
        scoring: RouterScoring::Softmax,
        normalise: true,
        scale: 1.0,
        shared: None,
        layers: vec![true; config.layers],
    }))
}

/// Attention and MLP between norms, and then the layer's own input of each token.
pub(super) struct Gemma4Layer<O: Ops> {
    /// In the first layer: what computes the inputs of all layers.
    table: Option<InputTable<O>>,
    attention_norm: O::Buffer,
    attention: SelfAttention<O>,
    post_attention_norm: O::Buffer,
    mlp_norm: O::Buffer,
    mlp: Mlp<O>,
    experts: Option<SideExperts<O>>,
    post_mlp_norm: O::Buffer,
    input: Option<LayerInput<O>>,
    /// `[1]`: by which the residual stream is multiplied.
    factor: O::Buffer,
}

impl<O: Ops> Gemma4Layer<O> {
    pub(super) fn load(l: &mut LayerLoader<O>, parts: Gemma4Parts) -> Option<Self> {
        let (prefix, config) = (l.prefix(), &l.spec.config);
        let hidden = config.hidden_size;
        let is_wide = parts.double_wide && config.donor(l.layer).is_some();
        let width = config.intermediate_size * if is_wide { 2 } else { 1 };
        let has_inputs = parts.input_width > 0;
        let table = (has_inputs && l.layer == 0).then(|| InputTable::load(l, parts));
        let mut norm = |name| l.tensors.norm(&format!("{prefix}{name}.weight"), hidden);
        let attention_norm = norm("input_layernorm");
        let post_attention_norm = norm("post_attention_layernorm");
        let mlp_norm = norm("pre_feedforward_layernorm");
        let post_mlp_norm = norm("post_feedforward_layernorm");
        let factor = l.tensors.vector(&format!("{prefix}layer_scalar"), 1, |factor| factor);
        let attention = SelfAttention::load(l, &prefix);
        let mlp = Mlp::load_as(l, &prefix, &mlp::ALONE, width);
        let mixture = l.spec.config.mixture.as_ref();
        let experts = mixture.map(|config| SideExperts::load(l, config, &prefix));
        let input = has_inputs.then(|| LayerInput::load(l, &prefix, parts.input_width));
        Some(Self {
            table: present(table)?,
            attention_norm: attention_norm?,
            attention: attention?,
            post_attention_norm: post_attention_norm?,
            mlp_norm: mlp_norm?,
            mlp: mlp?,
            experts: present(experts)?,
            post_mlp_norm: post_mlp_norm?,
            input: present(input)?,
            factor: factor?,
        })
    }
}

/// A part that a layer may not have; the outer `None` is one that could not be loaded.
fn present<T>(part: Option<Optional<T>>) -> Option<Optional<T>> {
    match part {
        Some(found) => found.map(Some),
        None => Some(None),
    }
}

impl<O: Ops> Layer<O> for Gemma4Layer<O> {
    fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        if let Some(table) = &self.table {
            table.compute(s, x)?;
        }
        s.add_norm(&self.attention_norm, x)?;
        self.attention.forward(s, x)?;
        if x.rows() == 0 {
            return Ok(());
        }
        s.add_normed(&self.post_attention_norm, x)?;
        s.add_norm(&self.mlp_norm, x)?;
        match &self.experts {
            None => self.mlp.forward(s, x)?,
            Some(experts) => experts.forward(s, x, &self.mlp)?,
        }
        s.add_normed(&self.post_mlp_norm, x)?;
        if let Some(input) = &self.input {
            input.forward(s, x)?;
        }
        let (x, factor) = (x.residual(), O::view(&self.factor));
        Ok(s.ops.scale(&ScaleArgs { x, factor })?)
    }
}

/// Experts beside the MLP. The router, the experts and the MLP each read the residual stream behind
/// a norm of their own; the two results are normed and added.
struct SideExperts<O: Ops> {
    mixture: Mixture<O>,
    router_norm: O::Buffer,
    norm: O::Buffer,
    post_mlp_norm: O::Buffer,
    post_norm: O::Buffer,
    /// `[tokens, hidden]` each
    router_input: Activations<O>,
    input: Activations<O>,
    mlp_result: Activations<O>,
    result: Activations<O>,
}

impl<O: Ops> SideExperts<O> {
    fn load(l: &mut LayerLoader<O>, config: &MixtureConfig, prefix: &str) -> Option<Self> {
        let hidden = l.spec.config.hidden_size;
        let scale = 1.0 / (hidden as f32).sqrt();
        let router_norm = l.tensors.scaled_norm(&format!("{prefix}router.scale"), hidden, scale);
        let mut norm = |name| l.tensors.norm(&format!("{prefix}{name}.weight"), hidden);
        let pre_norm = norm("pre_feedforward_layernorm_2");
        let post_mlp_norm = norm("post_feedforward_layernorm_1");
        let post_norm = norm("post_feedforward_layernorm_2");
        let mixture = Mixture::load(l, config, prefix);
        Some(Self {
            mixture: mixture?,
            router_norm: router_norm?,
            norm: pre_norm?,
            post_mlp_norm: post_mlp_norm?,
            post_norm: post_norm?,
            router_input: l.rows("router input", hidden)?,
            input: l.rows("experts input", hidden)?,
            mlp_result: l.rows("mlp result", hidden)?,
            result: l.rows("experts result", hidden)?,
        })
    }

    /// `x.input()`, which the MLP reads, and the residual stream → `x.sublayer_out()`.
    fn forward<'a>(
        &'a self,
        s: &LayerStep<'a, O>,
        x: &mut Stream<'a, O>,
        mlp: &'a Mlp<O>,
    ) -> Result<()> {
        let [router_input, input, mlp_result, result] =
            [&self.router_input, &self.input, &self.mlp_result, &self.result]
                .map(|rows| rows.first(x.rows()));
        mlp.compute(s, x, mlp_result)?;
        s.norm(x.residual(), None, &self.router_norm, router_input)?;
        s.norm(x.residual(), None, &self.norm, input)?;
        self.mixture.compute(s, x, [router_input, input], result)?;
        let out = x.sublayer_out();
        s.norm(mlp_result, None, &self.post_mlp_norm, out)?;
        let (weight, eps) = (O::view(&self.post_norm), s.epsilon());
        Ok(s.ops.add_normed(&AddNormedArgs { x: out, delta: result, weight, eps })?)
    }
}

/// The inputs of all layers.
const INPUTS: &str = "layer inputs";

/// Computes the inputs of all layers. They are made of a row of a table for each token and of a
/// projection of the token's embedding.
struct InputTable<O: Ops> {
    width: usize,
    /// `[vocab_size, layers * width]`
    table: O::Matrix,
    /// `[layers * width, hidden]`
    projection: O::Matrix,
    /// `[width]`
    norm: O::Buffer,
    /// `[tokens, layers * width]` each
    projected: Activations<O>,
    inputs: Activations<O>,
}

impl<O: Ops> InputTable<O> {
    fn load(l: &mut LayerLoader<O>, parts: Gemma4Parts) -> Option<Self> {
        let &ModelConfig { hidden_size, layers, .. } = &l.spec.config;
        let (width, all, t) = (parts.input_width, layers * parts.input_width, &mut *l.tensors);
        let table = t.matrix("model.embed_tokens_per_layer.weight", parts.input_rows, all);
        let projection = t.matrix("model.per_layer_model_projection.weight", all, hidden_size);
        // Both parts of an input are multiplied by this after they are added.
        let norm = t.scaled_norm("model.per_layer_projection_norm.weight", width, FRAC_1_SQRT_2);
        Some(Self {
            width,
            table: table?,
            projection: projection?,
            norm: norm?,
            projected: l.rows("layer inputs projected", all)?,
            inputs: l.rows(INPUTS, all)?,
        })
    }

    /// The step's ids, and the residual stream before the first layer → the inputs.
    fn compute<'a>(&'a self, s: &LayerStep<'a, O>, x: &Stream<'a, O>) -> Result<()> {
        let [projected, inputs] = [&self.projected, &self.inputs].map(|rows| rows.first(x.rows()));
        s.ops.gather(&GatherArgs {
            table: O::matrix(&self.table),
            ids: s.batch.ids,
            device: s.batch.device,
            scale: (self.width as f32).sqrt() * FRAC_1_SQRT_2,
            out: inputs,
        })?;
        s.linear(&self.projection, None, x.residual(), projected)?;
        // The projection would be divided by the root of the hidden size before its norm.
        let (eps, weight) = (s.epsilon() * s.config.hidden_size as f32, O::view(&self.norm));
        Ok(s.ops.add_normed(&AddNormedArgs { x: inputs, delta: projected, weight, eps })?)
    }
}

/// The share of a layer's own input in the residual stream.
struct LayerInput<O: Ops> {
    activation: Activation,
    /// `[width, hidden]`
    gate: O::Matrix,
    /// `[hidden, width]`
    projection: O::Matrix,
    norm: O::Buffer,
    /// `[tokens, layers * width]`
    inputs: Activations<O>,
    /// `[logits rows, layers * width]`
    selected: Activations<O>,
    /// `[tokens, width]` each
    gates: Activations<O>,
    gated: Activations<O>,
}

impl<O: Ops> LayerInput<O> {
    fn load(l: &mut LayerLoader<O>, prefix: &str, width: usize) -> Option<Self> {
        let &ModelConfig { hidden_size, layers, .. } = &l.spec.config;
        let name = |part: &str| format!("{prefix}{part}.weight");
        let t = &mut *l.tensors;
        let gate = t.matrix(&name("per_layer_input_gate"), width, hidden_size);
        let projection = t.matrix(&name("per_layer_projection"), hidden_size, width);
        let norm = t.norm(&name("post_per_layer_input_norm"), hidden_size);
        Some(Self {
            activation: l.spec.options.activation,
            gate: gate?,
            projection: projection?,
            norm: norm?,
            inputs: l.rows(INPUTS, layers * width)?,
            selected: l.selected_rows("layer inputs selected", layers * width)?,
            gates: l.rows("layer input gates", width)?,
            gated: l.rows("layer input gated", width)?,
        })
    }

    /// Adds it to the residual stream.
    fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        let (gate, out) = (self.gates.first(x.rows()), self.gated.first(x.rows()));
        s.linear(&self.gate, None, x.residual(), gate)?;
        let (stride, width) = (self.inputs.width, self.gates.width);
        s.ops.layer_input(&LayerInputArgs {
            activation: self.activation,
            gate,
            inputs: s.remaining_rows(x, &self.inputs, &self.selected)?,
            stride,
            first: s.layer * width,
            width,
            out,
        })?;
        s.linear(&self.projection, None, out, x.sublayer_out())?;
        s.add_normed(&self.norm, x)
    }
}

//! Reads a decoder's shape from the keys of a Hugging Face `config.json`.

use super::hf_keys::{HfConfigKeys, TIED};
use super::hf_rope;
use crate::config::{MixtureConfig, RouterScoring, SharedConfig, Sliding};
use crate::{ModelConfig, Result};
use cresset_kernels::activation::Activation;
use cresset_kernels::gpu::Kind;
use serde_json::Value;

impl HfConfigKeys {
    /// Leaves out the sections of a rotation for the axes of images, along which the positions of
    /// text are the same.
    pub(super) fn leave_out_sections(&mut self) -> Result<()> {
        for key in ["rope_parameters", "rope_scaling"] {
            self.take_inside::<Vec<usize>>(key, "mrope_section")?;
            self.take_inside::<bool>(key, "mrope_interleaved")?;
            // The older word for a rotation that has nothing but sections.
            if let Some(Value::Object(values)) = self.values.get_mut(key) {
                values.retain(|name, value| name != "type" || *value != "mrope");
            }
        }
        Ok(())
    }

    /// Reads what every decoder has.
    pub(super) fn decoder(&mut self, tied_embeddings: bool) -> Result<ModelConfig> {
        self.decoder_with(tied_embeddings, 1.0)
    }

    /// Reads the same of a decoder that rotates a part of each head.
    pub(super) fn decoder_with(&mut self, tied_embeddings: bool, part: f32) -> Result<ModelConfig> {
        let max_positions = self.required("max_position_embeddings")?;
        let (hidden_size, heads) =
            (self.required("hidden_size")?, self.required("num_attention_heads")?);
        let head_dim =
            self.take("head_dim")?.or(usize::checked_div(hidden_size, heads)).unwrap_or(0);
        let (rope, max_positions) = hf_rope::shared(self, head_dim, part, max_positions)?;
        let config = ModelConfig {
            vocab_size: self.required("vocab_size")?,
            hidden_size,
            intermediate_size: self.required("intermediate_size")?,
            layers: self.required("num_hidden_layers")?,
            heads,
            kv_heads: self.take("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            rms_norm_eps: self.take("rms_norm_eps")?.unwrap_or(1e-6),
            rope,
            max_positions,
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
            tied_embeddings: self.take(TIED)?.unwrap_or(tied_embeddings),
        };
        // The sizes are checked before anything is allocated by them.
        config.check().map_err(|what| self.bad(&what))?;
        Ok(config)
    }

    /// The part of each head that is rotated: a setting of its own, or one of the rotation.
    pub(super) fn rotated_part(&mut self, usual: f32) -> Result<f32> {
        const KEY: &str = "partial_rotary_factor";
        let own = self.take(KEY)?;
        let newer = self.take_inside("rope_parameters", KEY)?;
        let older = self.take_inside("rope_scaling", KEY)?;
        let part: f32 = newer.or(older).or(own).unwrap_or(usual);
        if part > 0.0 && part <= 1.0 {
            return Ok(part);
        }
        Err(self.bad("`partial_rotary_factor` is not a part of a head"))
    }

    /// Which layers are recurrent: those to which `layer_types` gives one of these `kinds`, or else
    /// `by_default`. The others have attention.
    pub(super) fn recurrent_layers(
        &mut self,
        layers: usize,
        kinds: &[&str],
        by_default: impl Fn(usize) -> bool,
    ) -> Result<Vec<bool>> {
        let Some(types) = self.take::<Vec<String>>("layer_types")? else {
            return Ok((0..layers).map(by_default).collect());
        };
        let is_recurrent = |kind: &String| match kind.as_str() {
            "full_attention" | "attention" => Ok(false),
            kind if kinds.contains(&kind) => Ok(true),
            other => Err(self.unsupported(&format!("the layer type {other:?} is not supported"))),
        };
        types.iter().map(is_recurrent).collect()
    }

    /// Reads the settings of experts of a width, in all layers.
    pub(super) fn mixture(&mut self, width: usize, layers: usize) -> Result<MixtureConfig> {
        let mut experts = None;
        for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
            experts = experts.or(self.take(key)?);
        }
        Ok(MixtureConfig {
            experts: experts.ok_or_else(|| self.bad("num_experts is missing"))?,
            chosen: self.required("num_experts_per_tok")?,
            intermediate_size: width,
            scoring: RouterScoring::Softmax,
            normalise: true,
            scale: 1.0,
            shared: None,
            layers: vec![true; layers],
        })
    }

    /// The number of groups of experts, and the number of groups from which experts are chosen.
    pub(super) fn expert_groups(&mut self) -> Result<[usize; 2]> {
        Ok([self.take("n_group")?.unwrap_or(1), self.take("topk_group")?.unwrap_or(1)])
    }

    /// Reads the settings of experts behind the first layers, beside one that computes every token.
    pub(super) fn later_mixture(
        &mut self,
        config: &ModelConfig,
        scoring: RouterScoring,
    ) -> Result<MixtureConfig> {
        let width: usize = self.required("moe_intermediate_size")?;
        let dense = self.take("first_k_dense_replace")?.unwrap_or(1);
        let shared: usize = self.take("n_shared_experts")?.unwrap_or(1);
        Ok(MixtureConfig {
            scoring,
            normalise: self.take("norm_topk_prob")?.unwrap_or(true),
            scale: self.take("routed_scaling_factor")?.unwrap_or(1.0),
            shared: (shared > 0)
                .then_some(SharedConfig { width: shared.saturating_mul(width), gated: false }),
            layers: (0..config.layers).map(|layer| layer >= dense).collect(),
            ..self.mixture(width, config.layers)?
        })
    }

    pub(super) fn activation(&mut self, key: &str, usual: Activation) -> Result<Activation> {
        match self.take::<String>(key)?.as_deref() {
            None => Ok(usual),
            Some("silu" | "swish") => Ok(Activation::Silu),
            Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
            Some(other) => Err(self.unsupported(&format!("`{key}` {other:?} is not supported"))),
        }
    }

    /// Takes `sliding_window` out; null means none.
    pub(super) fn window(&mut self, usual: usize) -> Result<Option<usize>> {
        if self.values.contains_key("sliding_window") {
            self.take("sliding_window")
        } else {
            Ok(Some(usual))
        }
    }

    /// The window, if `use_sliding_window` turns it on.
    pub(super) fn switched_window(&mut self) -> Result<Option<usize>> {
        let window = self.take("sliding_window")?;
        Ok(if self.flag("use_sliding_window")? { window } else { None })
    }

    /// Which layers have a sliding window: those that `layer_types` names, or else `by_default`.
    pub(super) fn sliding(
        &mut self,
        config: &ModelConfig,
        window: Option<usize>,
        by_default: impl Fn(usize) -> bool,
    ) -> Result<Option<Sliding>> {
        let layers = match self.take::<Vec<String>>("layer_types")? {
            Some(types) => types.iter().map(|kind| self.is_sliding(kind)).collect::<Result<_>>()?,
            None if window.is_some() => (0..config.layers).map(by_default).collect(),
            None => Vec::new(),
        };
        if !layers.contains(&true) {
            return Ok(None);
        }
        let window = window.ok_or_else(|| {
            self.bad("`layer_types` asks for a `sliding_window`, which is missing")
        })?;
        Ok(Some(Sliding { window, layers, rope: None, heads: None }))
    }

    fn is_sliding(&self, kind: &str) -> Result<bool> {
        match kind {
            "sliding_attention" => Ok(true),
            "full_attention" => Ok(false),
            other => Err(self.unsupported(&format!("the layer type {other:?} is not supported"))),
        }
    }
}

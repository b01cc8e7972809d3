//! What a decoder's shape is, whichever file format said it.

use crate::KvLayout;

#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture name as in the registry ("llama", …).
    pub architecture: String,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f32,
    pub rope: RopeConfig,
    /// Absolute limit of the model in tokens.
    pub max_positions: usize,
    pub sliding_window: Option<usize>,
    pub tied_embeddings: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    pub theta: f32,
    pub rotary_dim: usize,
    pub scaling: RopeScaling,
}

#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    Linear {
        factor: f32,
    },
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_max_positions: usize,
    },
    /// Per-frequency divisors as GGUF's `rope_freqs.weight` gives them, `[rotary_dim / 2]`.
    Factors(Vec<f32>),
}

impl ModelConfig {
    pub fn kv_layout(&self) -> KvLayout {
        KvLayout { layers: self.layers, kv_heads: self.kv_heads, head_dim: self.head_dim }
    }
}

/// Several times the largest of any published model: what a damaged config may make the loader do.
const MAX_WIDTH: usize = 1 << 22;
const MAX_LAYERS: usize = 1 << 10;

impl ModelConfig {
    /// Relations between the sizes that the forward pass relies on.
    pub(crate) fn check(&self) -> Result<(), String> {
        let rope = &self.rope;
        let widths =
            [self.vocab_size, self.hidden_size, self.intermediate_size, self.heads, self.kv_heads, self.head_dim];
        let sound = widths.iter().all(|width| (1..=MAX_WIDTH).contains(width))
            && (1..=MAX_LAYERS).contains(&self.layers)
            && self.max_positions > 0
            && self.sliding_window != Some(0);
        if !sound {
            return Err("the config has a size of zero, or one beyond any model's".into());
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!("{} heads cannot share {} KV heads", self.heads, self.kv_heads));
        }
        if rope.rotary_dim > self.head_dim || !rope.rotary_dim.is_multiple_of(2) {
            return Err(format!("a rotary dimension of {} does not fit heads of {}", rope.rotary_dim, self.head_dim));
        }
        if !(rope.theta.is_finite() && rope.theta > 0.0 && self.rms_norm_eps.is_finite() && self.rms_norm_eps > 0.0) {
            return Err("the RoPE base and the norm's epsilon must be positive".into());
        }
        Ok(())
    }
}

//! QK-norm, rotary embedding and the write into the paged cache on a device. `rope.cu` says how.

use super::RopeStyle;
use crate::Result;
use crate::gpu::{Gpu, View};

/// `qkv`, the caches and nothing else are of one kind, f32 or bf16.
pub struct RopeKv {
    /// `[n, (heads + 2 * kv_heads) * head_dim]`: Q is normed and rotated in place; K is rotated into the cache; V is copied.
    pub qkv: View,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// `[n]` u32.
    pub positions: View,
    /// `[n]` u32: slot (`block * block_size + offset`) of each token in the caches.
    pub slots: View,
    /// Each `[max_positions, rotary_dim / 2]` f32.
    pub cos: View,
    pub sin: View,
    pub style: RopeStyle,
    pub qk_norm: Option<QkNorm>,
    /// `[blocks, block_size, kv_heads, head_dim]`.
    pub k_cache: View,
    pub v_cache: View,
}

/// Weights of the per-head RMSNorm on Q and K: `[head_dim]` f32.
#[derive(Clone, Copy)]
pub struct QkNorm {
    pub q: View,
    pub k: View,
    pub eps: f32,
}

pub fn rope_kv_write(gpu: &dyn Gpu, args: &RopeKv) -> Result<()> {
    let _ = (gpu, args);
    Err(crate::Error::Unsupported { op: "rope", detail: "the device path is being written".into() })
}

//! QK-norm, rotary embedding and the write into the paged cache on a device. `rope.cu` says how.

use super::RopeStyle;
use crate::gpu::{Gpu, Kind, Launch, View};
use crate::storage::ensure;
use crate::{Result, args};

const OP: &str = "rope";
const HEADS_PER_BLOCK: usize = 8;

/// `qkv`, the caches and nothing else are of one kind, f32 or bf16.
pub struct RopeKv {
    /// `[n, (heads + 2 * kv_heads) * head_dim]`: Q is normed and rotated in place; K is rotated
    /// into the cache; V is copied.
    pub qkv: View,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// `[n]` u32.
    pub positions: View,
    /// `[n]` u32: slot (`block * block_size + offset`) of each token in the caches.
    pub slots: View,
    /// Values of a head that are turned; even.
    pub rotary_dim: usize,
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

/// Two tokens must not have one slot, unless what it holds is never read. Slots and positions are
/// on the device: one that leaves the cache or the tables fails the step.
pub fn rope_kv_write(gpu: &dyn Gpu, args: &RopeKv) -> Result<()> {
    let &RopeKv {
        qkv,
        heads,
        kv_heads,
        head_dim,
        positions,
        slots,
        rotary_dim,
        cos,
        sin,
        k_cache,
        v_cache,
        ..
    } = args;
    check(args)?;
    let items = positions.len() * (heads + 2 * kv_heads);
    if items == 0 {
        return Ok(());
    }
    let (half, norm) = (rotary_dim / 2, args.qk_norm);
    let max_positions = cos.len().checked_div(half).unwrap_or(u32::MAX as usize);
    let kernel = match qkv.kind() {
        Kind::Bf16 => "rope_bf16",
        _ => "rope_f32",
    };
    let args = args![
        qkv,
        positions,
        slots,
        cos,
        sin,
        norm.map(|norm| norm.q),
        norm.map(|norm| norm.k),
        norm.map_or(0.0, |norm| norm.eps),
        k_cache,
        v_cache,
        positions.len(),
        heads,
        kv_heads,
        head_dim,
        half,
        max_positions,
        k_cache.len() / (kv_heads * head_dim),
        u32::from(args.style == RopeStyle::Interleaved),
    ];
    let blocks = [items.div_ceil(HEADS_PER_BLOCK) as u32, 1, 1];
    gpu.launch(&Launch { kernel, blocks, threads: 128, shared_bytes: 0 }, &args)
}

fn check(args: &RopeKv) -> Result<()> {
    let &RopeKv {
        qkv,
        heads,
        kv_heads,
        head_dim,
        positions,
        slots,
        rotary_dim,
        cos,
        sin,
        k_cache,
        v_cache,
        ..
    } = args;
    let tokens = positions.kind() == Kind::U32
        && slots.kind() == Kind::U32
        && slots.len() == positions.len();
    let width = (heads + 2 * kv_heads) * head_dim;
    let rows = matches!(qkv.kind(), Kind::F32 | Kind::Bf16) && qkv.len() == positions.len() * width;
    ensure(OP, tokens && rows, || {
        format!("{qkv:?} of rows of {width} with {positions:?} and {slots:?}")
    })?;
    let slot = kv_heads * head_dim;
    let caches =
        [k_cache, v_cache].map(|cache| cache.kind() == qkv.kind() && cache.len() == k_cache.len());
    ensure(OP, caches == [true; 2] && slot > 0 && k_cache.len().is_multiple_of(slot), || {
        format!(
            "{k_cache:?} and {v_cache:?} for {kv_heads} heads of {head_dim} in {:?}",
            qkv.kind()
        )
    })?;
    let tables = cos.kind() == Kind::F32
        && sin.kind() == Kind::F32
        && sin.len() == cos.len()
        && rotary_dim.is_multiple_of(2)
        && rotary_dim <= head_dim
        && cos.len().is_multiple_of((rotary_dim / 2).max(1));
    ensure(OP, tables, || format!("{cos:?} and {sin:?} for {rotary_dim} of {head_dim} values"))?;
    let weights = args.qk_norm.map_or(vec![], |norm| vec![norm.q, norm.k]);
    ensure(OP, weights.iter().all(|w| w.kind() == Kind::F32 && w.len() == head_dim), || {
        format!("{weights:?} for heads of {head_dim}")
    })
}

#[cfg(test)]
mod tests;

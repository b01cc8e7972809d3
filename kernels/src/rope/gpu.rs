//! Launches the kernels of `rope.cu` and `latent.cu` on a device: QK-norm, rotary embedding and the
//! write into the paged cache.

use super::{E4M3, LATENT, OP, Rope, RopeArgs, RopeLatentArgs, RopeStyle, RopeTable, cached};
use crate::error::ensure;
use crate::gpu::{Kind, Launch, View};
use crate::operand::DeviceOps;
use crate::{Result, args};

const HEADS_PER_BLOCK: usize = 8;
/// Vectors of latent attention.
const VECTORS_PER_BLOCK: usize = 4;

impl Rope for DeviceOps {
    fn rope_kv_write(&self, args: &RopeArgs<View>) -> Result<()> {
        let n = args.check()?;
        let &RopeArgs { qkv, heads, kv_heads, head_dim, positions, slots, .. } = args;
        let &RopeArgs { table, qk_norm: norm, k_cache, v_cache, block_size, .. } = args;
        let (kind, e4m3) = (k_cache.kind(), k_cache.kind() == E4M3);
        let fits =
            kind == qkv.kind() || e4m3 && qkv.kind() == Kind::Bf16 && head_dim.is_multiple_of(16);
        ensure(OP, fits, || format!("{k_cache:?} for {qkv:?} and heads of {head_dim}"))?;
        let items = n * (heads + 2 * kv_heads);
        if items == 0 {
            return Ok(());
        }
        let RopeTable { cos, sin, rotary_dim, style, query_scales: scales } = table;
        let half = rotary_dim / 2;
        let max_positions = cos.len().checked_div(half).unwrap_or(u32::MAX as usize);
        let kernel = qkv.kind().kernel("rope_f32", "rope_bf16");
        let (q_norm, k_norm, eps) =
            (norm.map(|n| n.q), norm.map(|n| n.k), norm.map_or(0.0, |n| n.eps));
        let slots_cached = k_cache.len().checked_div(cached(kind, kv_heads, head_dim)).unwrap_or(0);
        let [k_cache, v_cache] = [k_cache, v_cache].map(View::in_pairs);
        let block_size = if e4m3 { block_size } else { 0 };
        let interleaved = u32::from(style == RopeStyle::Interleaved);
        let inputs = args![qkv, positions, slots, cos, sin, scales, q_norm, k_norm, eps];
        let rest = args![
            k_cache,
            v_cache,
            n,
            heads,
            kv_heads,
            head_dim,
            half,
            max_positions,
            slots_cached
        ];
        let args = [&inputs[..], &rest, &args![block_size, interleaved]].concat();
        let blocks = [items.div_ceil(HEADS_PER_BLOCK) as u32, 1, 1];
        self.launch(&Launch { kernel, blocks, threads: 128, shared_bytes: 0 }, &args)
    }

    fn rope_latent(&self, args: &RopeLatentArgs<View>) -> Result<()> {
        args.check()?;
        let &RopeLatentArgs { plain, rotary, latent, heads, rank, positions, slots, .. } = args;
        let &RopeLatentArgs { table, queries, cache, .. } = args;
        let fits = cache.kind() == queries.kind();
        ensure(LATENT, fits, || format!("{cache:?} for {queries:?}"))?;
        let n = positions.len();
        if n == 0 {
            return Ok(());
        }
        let RopeTable { cos, sin, rotary_dim, style, query_scales: scales } = table;
        let (half, interleaved) = (rotary_dim / 2, u32::from(style == RopeStyle::Interleaved));
        let (max_positions, max_slots) = (cos.len() / half, cache.len() / args.width());
        let kernel = queries.kind().kernel("rope_latent_f32", "rope_latent_bf16");
        let inputs = args![plain, rotary, latent, positions, slots, cos, sin, scales];
        let rest = args![queries, cache, n, heads, rank, half, max_positions, max_slots];
        let params = [&inputs[..], &rest, &args![interleaved]].concat();
        let blocks = [(n * (heads + 1)).div_ceil(VECTORS_PER_BLOCK) as u32, 1, 1];
        self.launch(&Launch { kernel, blocks, threads: 128, shared_bytes: 0 }, &params)
    }
}

#[cfg(test)]
mod tests;

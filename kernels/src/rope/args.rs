//! The arguments of the rotation and the write into the cache.

use super::{LATENT, OP, RopeStyle};
use crate::Result;
use crate::error::ensure;
use crate::gpu::Kind;
use crate::operand::{Operand, distinct, is_activation};

/// Q is normed and rotated in place; K is normed and rotated into the cache, which leaves its part
/// of `qkv` unspecified; V is copied.
#[derive(Clone, Copy, Debug)]
pub struct RopeArgs<V: Operand> {
    /// `[n, (heads + 2 * kv_heads) * head_dim]` activations (f32 or, on a device, bf16).
    pub qkv: V,
    pub heads: usize,
    /// 0 in layers that read what an earlier one wrote: then the caches stay as they are.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// `[n]`: each is below the number of positions in `table`.
    pub positions: V::Indices,
    /// `[n]`: the slot (`block * block_size + offset`) of each token in the caches. Two tokens may
    /// share a slot only if it is never read.
    pub slots: V::Indices,
    pub table: RopeTable<V>,
    pub qk_norm: Option<QkNorm<V>>,
    /// `blocks * block_size * kv_heads * head_dim` values; they share no memory with anything else.
    ///
    /// On the CPU they are f32 or f16: K is `[blocks, kv_heads, head_dim, block_size]`, V is
    /// `[blocks, kv_heads, block_size, head_dim]`. On a device they are of the kind of `qkv`, and
    /// both are `[blocks, block_size, kv_heads, head_dim]`. Beside `qkv` in bf16 they may be of the
    /// kind [`E4M3`] there: codes of that shape, each 16 dimensions of a head in an order of their
    /// own, and behind all of them the scales, `[blocks, kv_heads, block_size]` in bf16. A value is
    /// its code times the scale, which gives the largest value of a head of a token the code 448.
    pub k_cache: V,
    pub v_cache: V,
    pub block_size: usize,
}

/// The kind of a cache in floats of eight bits, which are stored as bytes.
pub const E4M3: Kind = Kind::U8;

/// The elements of a cache of `kind` that the K, or the V, of one token takes.
pub fn cached(kind: Kind, kv_heads: usize, head_dim: usize) -> usize {
    let scale = if kind == E4M3 { Kind::Bf16.bytes() } else { 0 };
    kv_heads * (head_dim + scale)
}

/// The cosines and sines of all positions, each `[positions, rotary_dim / 2]` f32.
#[derive(Clone, Copy, Debug)]
pub struct RopeTable<V> {
    pub cos: V,
    pub sin: V,
    /// So many values of each head are rotated; the number is even.
    pub rotary_dim: usize,
    pub style: RopeStyle,
    /// `[positions]` f32: the queries of a position are multiplied by this.
    pub query_scales: Option<V>,
}

/// Weights of the per-head RMSNorm on Q and K: `[head_dim]` f32.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm<V> {
    pub q: V,
    pub k: V,
    pub eps: f32,
}

/// The rotation of latent attention, where each token caches one vector for all heads, of which the
/// last `table.rotary_dim` values are a key that is rotated. Queries are put together from the
/// parts that meet the two parts of that vector. DeepSeek-AI 2024, "DeepSeek-V2".
#[derive(Clone, Copy, Debug)]
pub struct RopeLatentArgs<V: Operand> {
    /// `[n, heads, rank]` activations (f32 or, on a device, bf16): the parts of queries that are
    /// not rotated.
    pub plain: V,
    /// `[n, heads, rotary_dim]` of the same kind: those that are.
    pub rotary: V,
    /// `[n, rank + rotary_dim]` of the same kind: what is cached, the key not yet rotated.
    pub latent: V,
    pub heads: usize,
    pub rank: usize,
    /// `[n]` each, as those of [`RopeArgs`].
    pub positions: V::Indices,
    pub slots: V::Indices,
    pub table: RopeTable<V>,
    /// `[n, heads, rank + rotary_dim]` of the same kind: the queries.
    pub queries: V,
    /// K of one head as [`RopeArgs`] says: `[blocks, rank + rotary_dim, block_size]` on the CPU,
    /// `[blocks, block_size, rank + rotary_dim]` on a device. Like `queries` it shares no memory
    /// with anything else.
    pub cache: V,
    pub block_size: usize,
}

impl<V: Operand> RopeLatentArgs<V> {
    /// Values that a token caches.
    pub(super) fn width(&self) -> usize {
        self.rank + self.table.rotary_dim
    }

    pub(super) fn check(&self) -> Result<()> {
        let &Self { plain, rotary, latent, heads, rank, positions, slots, .. } = self;
        let &Self { table, queries, cache, block_size, .. } = self;
        let (width, rotary_dim) = (self.width(), table.rotary_dim);
        let sized = |n: usize| {
            plain.len() == n * heads * rank
                && rotary.len() == n * heads * rotary_dim
                && latent.len() == n * width
                && queries.len() == n * heads * width
        };
        ensure(LATENT, heads > 0 && rank > 0 && rotary_dim > 0, || {
            format!("{heads} heads of {rank} and {rotary_dim} values")
        })?;
        let alike = [rotary, latent, queries].iter().all(|x| x.kind() == plain.kind());
        let fits = is_activation(plain.kind()) && alike && V::count(slots) == V::count(positions);
        ensure(LATENT, fits && V::count(positions).is_some_and(sized), || {
            format!("{plain:?}, {rotary:?}, {latent:?} and {queries:?} for {heads} heads")
        })?;
        let block = block_size * width;
        ensure(LATENT, block > 0 && cache.len().is_multiple_of(block), || {
            format!("{cache:?} in blocks of {block_size} vectors of {width}")
        })?;
        check_table(LATENT, &table, rotary_dim)?;
        distinct(LATENT, queries, &[plain, rotary, latent, cache])?;
        distinct(LATENT, cache, &[plain, rotary, latent])
    }
}

fn check_table<V: Operand>(op: &'static str, table: &RopeTable<V>, head_dim: usize) -> Result<()> {
    let &RopeTable { cos, sin, rotary_dim, query_scales, .. } = table;
    let fits = cos.kind() == Kind::F32
        && sin.kind() == Kind::F32
        && sin.len() == cos.len()
        && rotary_dim.is_multiple_of(2)
        && rotary_dim <= head_dim
        && cos.len().is_multiple_of((rotary_dim / 2).max(1));
    ensure(op, fits, || format!("{cos:?} and {sin:?} for {rotary_dim} of {head_dim} values"))?;
    let positions = cos.len().checked_div(rotary_dim / 2);
    let fits = |scales: V| scales.kind() == Kind::F32 && Some(scales.len()) == positions;
    ensure(op, query_scales.is_none_or(fits), || format!("{query_scales:?} for {positions:?}"))
}

impl<V: Operand> RopeArgs<V> {
    /// Returns the number of tokens.
    pub(super) fn check(&self) -> Result<usize> {
        let &Self { qkv, heads, kv_heads, head_dim, positions, slots, .. } = self;
        let (width, tokens) = ((heads + 2 * kv_heads) * head_dim, V::count(positions));
        let fits = is_activation(qkv.kind())
            && V::count(slots) == tokens
            && tokens.is_some_and(|n| qkv.len() == n * width);
        ensure(OP, fits, || {
            format!("{qkv:?} of rows of {width} with {positions:?} and {slots:?}")
        })?;
        distinct(OP, qkv, &[self.k_cache, self.v_cache])?;
        distinct(OP, self.k_cache, &[self.v_cache])?;
        self.check_caches()?;
        check_table(OP, &self.table, head_dim)?;
        let weights = self.qk_norm.map_or(vec![], |norm| vec![norm.q, norm.k]);
        ensure(OP, weights.iter().all(|w| w.kind() == Kind::F32 && w.len() == head_dim), || {
            format!("{weights:?} for heads of {head_dim}")
        })?;
        Ok(tokens.unwrap_or(0))
    }

    fn check_caches(&self) -> Result<()> {
        let &Self { k_cache, v_cache, kv_heads, head_dim, block_size, .. } = self;
        let block = block_size * cached(k_cache.kind(), kv_heads, head_dim);
        let fits = k_cache.kind() == v_cache.kind()
            && k_cache.len() == v_cache.len()
            && block_size * head_dim > 0
            && (kv_heads == 0 || k_cache.len().is_multiple_of(block));
        ensure(OP, fits, || {
            format!("{k_cache:?} and {v_cache:?} for {kv_heads} heads of {head_dim}")
        })
    }
}

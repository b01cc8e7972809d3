//! The arguments of attention.

use super::OP;
use crate::Result;
use crate::error::ensure;
use crate::gpu::Kind;
use crate::operand::{Operand, distinct, is_activation};
use crate::rope::cached;

/// Causal attention of each query over the keys of its own sequence. `S` says which queries and
/// blocks belong to which sequence: see [`Attention::Sequences`](super::Attention::Sequences).
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs<V, S> {
    /// `[n, q_stride]` activations (f32 or, on a device, bf16): the first `heads * head_dim`
    /// columns are Q, rotated (a fused QKV buffer may be passed as it is).
    pub q: V,
    /// The caches are those that [`RopeArgs`](crate::rope::RopeArgs) describes, or twice the one of
    /// [`RopeLatentArgs`](crate::rope::RopeLatentArgs).
    pub k_cache: V,
    pub v_cache: V,
    /// `[heads]` f32: a score of each head that takes part in the softmax beside those of the
    /// keys, and has no value. Xiao et al. 2023, "StreamingLLM".
    pub sinks: Option<V>,
    pub shape: AttentionShape,
    pub sequences: S,
    /// `[n, heads * value_dim]` of the kind of `q`; it shares no memory with anything else. Values
    /// have `head_dim` dimensions, or as many as `shape.value_prefix` says.
    pub out: V,
}

/// The numbers of an attention: the sizes of its operands, and how scores are computed.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    pub q_stride: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// On a device, 16, 32, 64, 80, 96, 128 and 256 have the fastest kernels in bf16.
    pub head_dim: usize,
    /// If set, the value of a key is this many of the key's first dimensions, and `v_cache` is
    /// `k_cache`. On a device, values have at most 512 dimensions.
    pub value_prefix: Option<usize>,
    /// Tokens of a block. On a device this is a power of two, at least 16; the CPU is fastest if
    /// it is a multiple of sixteen.
    pub block_size: usize,
    /// The products of Q and K are multiplied by this.
    pub scale: f32,
    /// A query at position p sees keys in (p - window, p].
    pub window: Option<usize>,
    /// If set, a score becomes `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
}

impl<V: Operand, S> AttentionArgs<V, S> {
    /// Returns the number of queries.
    pub(super) fn check(&self) -> Result<usize> {
        let &Self { q, out, shape, .. } = self;
        let AttentionShape { q_stride, heads, kv_heads, head_dim, .. } = shape;
        ensure(
            OP,
            kv_heads > 0 && head_dim > 0 && heads > 0 && heads.is_multiple_of(kv_heads),
            || format!("{heads} heads over {kv_heads} KV heads of {head_dim}"),
        )?;
        ensure(OP, (1..=head_dim).contains(&shape.value_dim()), || {
            format!("values of {} in keys of {head_dim}", shape.value_dim())
        })?;
        let (q_width, width) = (heads * head_dim, heads * shape.value_dim());
        let n = out.len() / width;
        let fits = is_activation(q.kind())
            && out.kind() == q.kind()
            && out.len() == n * width
            && q_stride >= q_width
            && (n == 0 || q.len() >= (n - 1) * q_stride + q_width);
        ensure(OP, fits, || format!("{q:?} for {n} rows of {q_stride} and {out:?}"))?;
        distinct(OP, out, &[q, self.k_cache, self.v_cache])?;
        self.check_caches()?;
        if let Some(sinks) = self.sinks {
            let fits = sinks.kind() == Kind::F32 && sinks.len() == heads;
            ensure(OP, fits, || format!("sinks {sinks:?} for {heads} heads"))?;
            distinct(OP, out, &[sinks])?;
        }
        let AttentionShape { scale, window, softcap, .. } = shape;
        let positive = scale > 0.0 && window != Some(0) && softcap.is_none_or(|cap| cap > 0.0);
        ensure(OP, positive, || format!("scale {scale}, window {window:?}, cap {softcap:?}"))?;
        Ok(n)
    }

    fn check_caches(&self) -> Result<()> {
        let &Self { k_cache, v_cache, shape, .. } = self;
        let (block, block_size) = (shape.block_values(k_cache.kind()), shape.block_size);
        let fits = block > 0
            && k_cache.len().is_multiple_of(block)
            && k_cache.len() == v_cache.len()
            && k_cache.kind() == v_cache.kind()
            && (shape.value_prefix.is_none() || k_cache.shares_memory(v_cache));
        ensure(OP, fits, || {
            format!("caches {k_cache:?} and {v_cache:?} in blocks of {block_size} tokens")
        })
    }

    /// Blocks of the caches.
    pub(super) fn blocks(&self) -> usize {
        self.k_cache.len() / self.shape.block_values(self.k_cache.kind())
    }
}

impl AttentionShape {
    /// Elements of one block in each cache of `kind`.
    fn block_values(&self, kind: Kind) -> usize {
        self.block_size * cached(kind, self.kv_heads, self.head_dim)
    }

    /// Dimensions of a value.
    pub(super) fn value_dim(&self) -> usize {
        self.value_prefix.unwrap_or(self.head_dim)
    }

    /// Query heads for each KV head.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

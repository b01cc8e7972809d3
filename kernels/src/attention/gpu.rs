//! Paged attention on a device. `attention.cu` says how.

use crate::Result;
use crate::gpu::{Gpu, View};

/// What both kinds of step share. `q`, the caches and `out` are of one kind, f32 or bf16. Everything that changes from step to
/// step is read on the device, so a recorded launch stays right.
#[derive(Clone, Copy)]
pub struct Paged {
    /// `[n, q_stride]`: the first `heads * head_dim` columns are Q, rotated.
    pub q: View,
    pub q_stride: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// `[blocks, block_size, kv_heads, head_dim]`.
    pub k_cache: View,
    pub v_cache: View,
    pub block_size: usize,
    /// `[sequences]` u32: tokens of each in the cache after this step; its last query has position `seq_len - 1`.
    pub seq_lens: View,
    /// u32, `[sequences, table_stride]` with the stride of `header`.
    pub block_tables: View,
    /// `[2]` u32: `table_stride`, and the tokens of one split of the keys (a multiple of 64).
    pub header: View,
    pub scale: f32,
    /// A query at position p sees keys in (p - window, p].
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// `[n, heads * head_dim]`.
    pub out: View,
}

/// One query a sequence: query i belongs to sequence i. At most `max_splits` splits a sequence, with their partial results in
/// `workspace` (`decode_workspace` elements, f32).
pub fn decode(gpu: &dyn Gpu, args: &Paged, max_splits: usize, workspace: View) -> Result<()> {
    let _ = (gpu, args, max_splits, workspace);
    Err(crate::Error::Unsupported { op: "attention", detail: "the device path is being written".into() })
}

pub fn decode_workspace(sequences: usize, heads: usize, head_dim: usize, max_splits: usize) -> usize {
    let _ = (sequences, heads, head_dim, max_splits);
    0
}

/// Any number of queries a sequence: `cu_seqlens_q` `[sequences + 1]` u32 on the device; `most_queries` is no less than those of any
/// sequence. A query's result has the same bits as `decode` would give it with the same tokens in a split.
pub fn prefill(gpu: &dyn Gpu, args: &Paged, cu_seqlens_q: View, most_queries: usize) -> Result<()> {
    let _ = (gpu, args, cu_seqlens_q, most_queries);
    Err(crate::Error::Unsupported { op: "attention", detail: "the device path is being written".into() })
}

/// How many tokens of keys one split has, for `header`: what `decode` is fastest with, or with `invariant` a number that depends
/// on nothing but `max_context`. Never more than `max_splits` splits for `longest` tokens.
pub fn tokens_per_split(
    gpu: &dyn Gpu,
    sequences: usize,
    kv_heads: usize,
    longest: usize,
    max_context: usize,
    max_splits: usize,
    invariant: bool,
) -> usize {
    let _ = (gpu, sequences, kv_heads, longest, max_context, max_splits, invariant);
    0
}

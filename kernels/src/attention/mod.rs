//! Causal attention of a ragged batch over the paged KV cache, grouped heads, optional sliding
//! window and soft cap.

mod cpu;
pub mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
mod tile;

use crate::element::Element;
use crate::simd::Isa;
use crate::storage::{Parts, dims2, distinct, ensure, read, read_as, shape, unsupported, write};
use crate::{Compute, Result};
use candle_core::{DType, Tensor};
use half::f16;

pub struct AttentionArgs<'a> {
    /// `[n, q_stride]` f32, the first `heads * head_dim` columns are Q (a fused QKV buffer may be
    /// passed as it is).
    pub q: &'a Tensor,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// `[blocks, kv_heads, head_dim, block_size]` f32 or f16; fastest where `block_size` is a
    /// multiple of sixteen.
    pub k_cache: &'a Tensor,
    /// `[blocks, kv_heads, block_size, head_dim]`, as wide as K.
    pub v_cache: &'a Tensor,
    /// `[sequences + 1]`: rows of each sequence's queries.
    pub cu_seqlens_q: &'a [u32],
    /// Tokens of each sequence in the cache after this step (its last query has position `seq_len -
    /// 1`).
    pub seq_lens: &'a [u32],
    /// Each sequence's blocks, in order.
    pub block_tables: &'a [Vec<u32>],
    pub scale: f32,
    /// A query at position p sees keys in (p - window, p].
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// `[n, heads * head_dim]` f32.
    pub out: &'a Tensor,
}

const OP: &str = "paged_attention";

/// A query's result depends only on its own keys: the same bits alone, in a batch, and however its
/// prompt was chunked.
pub fn paged_attention(c: &Compute, args: &AttentionArgs) -> Result<()> {
    check(args)?;
    match args.k_cache.dtype() {
        DType::F32 => run::<f32>(c, args),
        DType::F16 => run::<f16>(c, args),
        _ => Err(unsupported(OP, args.k_cache)),
    }
}

fn run<E: Element>(c: &Compute, args: &AttentionArgs) -> Result<()> {
    let (q, k, v) =
        (read(OP, args.q)?, read_as::<E>(OP, args.k_cache)?, read_as::<E>(OP, args.v_cache)?);
    let inputs = cpu::CpuArgs {
        q: &q,
        k: &k,
        v: &v,
        q_stride: args.q.dims()[1],
        block_size: args.k_cache.dims()[3],
        group: args.heads / args.kv_heads,
        kv_heads: args.kv_heads,
        head_dim: args.head_dim,
        scale: args.scale,
        window: args.window,
        softcap: args.softcap,
    };
    let tiles = query_tiles(args, cpu::queries_per_tile(inputs.group));
    write(OP, args.out, |out| {
        cpu::run(Isa::best(), c, &inputs, &tiles, Parts::new(out));
        Ok(())
    })
}

/// Consecutive queries of one sequence.
struct QueryTile<'a> {
    /// Rows of `q` and `out`.
    rows: std::ops::Range<usize>,
    /// Position of the first.
    position: usize,
    blocks: &'a [u32],
}

fn query_tiles<'a>(args: &AttentionArgs<'a>, queries: usize) -> Vec<QueryTile<'a>> {
    let mut tiles = Vec::new();
    for (i, span) in args.cu_seqlens_q.windows(2).enumerate() {
        let (start, end) = (span[0] as usize, span[1] as usize);
        let first = args.seq_lens[i] as usize - (end - start);
        tiles.extend((start..end).step_by(queries).map(|row| QueryTile {
            rows: row..end.min(row + queries),
            position: first + row - start,
            blocks: &args.block_tables[i],
        }));
    }
    tiles
}

/// Everything an index could hit is checked before anything is read: a wrong block is another
/// sequence's memory.
fn check(args: &AttentionArgs) -> Result<()> {
    let (n, q_stride) = dims2(OP, args.q)?;
    let width = args.heads * args.head_dim;
    ensure(
        OP,
        args.kv_heads > 0 && args.head_dim > 0 && args.heads.is_multiple_of(args.kv_heads),
        || format!("{} heads over {} KV heads of {}", args.heads, args.kv_heads, args.head_dim),
    )?;
    ensure(OP, q_stride >= width && args.out.dims() == [n, width], || {
        format!("q {:?} and out {:?} for heads of {width}", args.q.dims(), args.out.dims())
    })?;
    distinct(OP, &[args.out, args.q])?;
    distinct(OP, &[args.out, args.k_cache, args.v_cache])?;
    let blocks = cache_shape(OP, args.k_cache, args.v_cache, args.kv_heads, args.head_dim)?;
    check_sequences(args, n, blocks)
}

/// The number of blocks of a cache and their size.
pub(crate) fn cache_shape(
    op: &'static str,
    k: &Tensor,
    v: &Tensor,
    kv_heads: usize,
    head_dim: usize,
) -> Result<(usize, usize)> {
    match k.dims() {
        &[blocks, heads, dim, size]
            if heads == kv_heads && dim == head_dim && v.dims() == [blocks, heads, size, dim] =>
        {
            Ok((blocks, size))
        }
        k => Err(shape(
            op,
            format!("caches {k:?} and {:?} for {kv_heads} heads of {head_dim}", v.dims()),
        )),
    }
}

fn check_sequences(
    args: &AttentionArgs,
    n: usize,
    (blocks, block_size): (usize, usize),
) -> Result<()> {
    let sequences = args.seq_lens.len();
    let ends = (args.cu_seqlens_q.first(), args.cu_seqlens_q.last());
    let ok = args.cu_seqlens_q.len() == sequences + 1
        && args.block_tables.len() == sequences
        && ends == (Some(&0), Some(&(n as u32)));
    ensure(OP, ok, || {
        format!(
            "{sequences} sequences, {} tables and spans {ends:?} for {n} rows",
            args.block_tables.len()
        )
    })?;
    for (i, table) in args.block_tables.iter().enumerate() {
        let (start, end, len) = (args.cu_seqlens_q[i], args.cu_seqlens_q[i + 1], args.seq_lens[i]);
        ensure(OP, start <= end && end - start <= len, || {
            format!("sequence {i}: rows {start}..{end} for {len} tokens")
        })?;
        ensure(OP, table.len() * block_size >= len as usize, || {
            format!("sequence {i}: {} blocks of {block_size} for {len} tokens", table.len())
        })?;
        if let Some(block) = table.iter().find(|b| **b as usize >= blocks) {
            return Err(shape(OP, format!("sequence {i}: block {block} of a cache of {blocks}")));
        }
    }
    Ok(())
}

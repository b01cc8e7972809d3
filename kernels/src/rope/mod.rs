//! Optional per-head QK-norm, rotary position embedding and the write into the paged KV cache,
//! fused.
//! Su et al. 2021, "RoFormer".

mod cpu;
pub mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::attention::cache_shape;
use crate::element::Element;
use crate::simd::Isa;
use crate::storage::{Parts, distinct, ensure, read, shape, unsupported, write, write_as};
use crate::{Compute, Result};
use candle_core::{DType, Tensor};
use half::f16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs (i, i + d/2): HF checkpoints and GGUF "neox" families.
    Neox,
    /// Pairs (2i, 2i + 1): GGUF files of the llama architecture, whose Q and K rows are permuted
    /// for it.
    Interleaved,
}

/// Precomputed `cos` and `sin`, each `[max_positions, rotary_dim / 2]` f32.
pub struct RopeTable {
    pub cos: Tensor,
    pub sin: Tensor,
    pub style: RopeStyle,
}

/// Weights of the per-head RMSNorm on Q and K: `[head_dim]` f32.
pub struct QkNorm {
    pub q: Tensor,
    pub k: Tensor,
    pub eps: f32,
}

pub struct RopeKvArgs<'a> {
    /// `[n, (heads + 2 * kv_heads) * head_dim]` f32: Q is normed and rotated in place; K is rotated
    /// into the cache; V is copied.
    pub qkv: &'a Tensor,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub positions: &'a [u32],
    /// Slot (`block * block_size + offset`) of each token in the cache.
    pub slot_mapping: &'a [u32],
    pub table: &'a RopeTable,
    pub qk_norm: Option<&'a QkNorm>,
    /// `[blocks, kv_heads, head_dim, block_size]` f32 or f16.
    pub k_cache: &'a Tensor,
    /// `[blocks, kv_heads, block_size, head_dim]`, as wide as K.
    pub v_cache: &'a Tensor,
}

const OP: &str = "rope_kv_write";
/// Fewer values than this are not worth waking a thread for.
const VALUES_PER_TASK: usize = 16 * 1024;

/// The K part of `qkv` is left unspecified.
pub fn rope_kv_write(c: &Compute, args: &RopeKvArgs) -> Result<()> {
    let blocks = check(args)?;
    match args.k_cache.dtype() {
        DType::F32 => run::<f32>(c, args, blocks),
        DType::F16 => run::<f16>(c, args, blocks),
        _ => Err(unsupported(OP, args.k_cache)),
    }
}

fn run<E: Element>(c: &Compute, args: &RopeKvArgs, (_, block_size): (usize, usize)) -> Result<()> {
    let (cos, sin) = (read(OP, &args.table.cos)?, read(OP, &args.table.sin)?);
    let norm = match args.qk_norm {
        Some(n) => Some((read(OP, &n.q)?, read(OP, &n.k)?, n.eps)),
        None => None,
    };
    let heads = cpu::Heads {
        q: args.heads,
        kv: args.kv_heads,
        dim: args.head_dim,
        style: args.table.style,
        norm: norm.as_ref().map(|(q, k, eps)| (&**q, &**k, *eps)),
    };
    let half = args.table.cos.dims()[1];
    let width = (args.heads + 2 * args.kv_heads) * args.head_dim;
    let (n, rows) = (args.positions.len(), (VALUES_PER_TASK / width.max(1)).max(1));
    write(OP, args.qkv, |qkv| {
        write_as::<E>(OP, args.k_cache, |k_cache| {
            write_as::<E>(OP, args.v_cache, |v_cache| {
                let qkv = Parts::new(qkv);
                let cache =
                    cpu::Cache { k: Parts::new(k_cache), v: Parts::new(v_cache), block_size };
                c.run(n.div_ceil(rows), |task| {
                    for i in task * rows..n.min((task + 1) * rows) {
                        let position = args.positions[i] as usize;
                        let angles = position * half..(position + 1) * half;
                        // SAFETY: each row belongs to one task.
                        let qkv = unsafe { qkv.slice(i * width..(i + 1) * width) };
                        let slot = args.slot_mapping[i] as usize;
                        // `check` found every slot once.
                        cpu::token(
                            Isa::best(),
                            &heads,
                            &cos[angles.clone()],
                            &sin[angles],
                            qkv,
                            &cache,
                            slot,
                        );
                    }
                });
                Ok(())
            })
        })
    })
}

/// Everything an index could hit is checked before anything is written: a wrong slot is another
/// sequence's memory. Returns the cache's blocks and their size.
fn check(args: &RopeKvArgs) -> Result<(usize, usize)> {
    let n = args.positions.len();
    let width = (args.heads + 2 * args.kv_heads) * args.head_dim;
    ensure(OP, args.qkv.dims() == [n, width], || {
        format!("qkv {:?} for {n} positions of width {width}", args.qkv.dims())
    })?;
    distinct(OP, &[args.qkv, args.k_cache, args.v_cache])?;
    check_table(args)?;
    check_norm(args)?;
    check_slots(args)
}

fn check_table(args: &RopeKvArgs) -> Result<()> {
    let (cos, sin) = (args.table.cos.dims(), args.table.sin.dims());
    let &[positions, half] = cos else {
        return Err(shape(OP, format!("cos table {cos:?}, expected a matrix")));
    };
    ensure(OP, cos == sin && 2 * half <= args.head_dim, || {
        format!("tables {cos:?} and {sin:?} for heads of {}", args.head_dim)
    })?;
    match args.positions.iter().find(|p| **p as usize >= positions) {
        None => Ok(()),
        Some(p) => Err(shape(OP, format!("position {p} is beyond the table's {positions}"))),
    }
}

fn check_norm(args: &RopeKvArgs) -> Result<()> {
    let Some(norm) = args.qk_norm else { return Ok(()) };
    let ok = norm.q.dims() == [args.head_dim] && norm.k.dims() == [args.head_dim];
    ensure(OP, ok, || format!("norm weights {:?} and {:?}", norm.q.dims(), norm.k.dims()))
}

fn check_slots(args: &RopeKvArgs) -> Result<(usize, usize)> {
    let (blocks, block_size) =
        cache_shape(OP, args.k_cache, args.v_cache, args.kv_heads, args.head_dim)?;
    ensure(OP, args.slot_mapping.len() == args.positions.len(), || {
        format!("{} slots for {} tokens", args.slot_mapping.len(), args.positions.len())
    })?;
    let mut slots = args.slot_mapping.to_vec();
    slots.sort_unstable();
    if let Some(slot) = slots.windows(2).find_map(|w| (w[0] == w[1]).then_some(w[0])) {
        return Err(shape(OP, format!("slot {slot} is given to two tokens")));
    }
    match slots.last() {
        Some(last) if *last as usize >= blocks * block_size => {
            Err(shape(OP, format!("slot {last} is beyond the cache's {}", blocks * block_size)))
        }
        _ => Ok((blocks, block_size)),
    }
}

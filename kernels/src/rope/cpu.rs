//! RoPE on the CPU, one token at a time: the compiler vectorises these loops once the instruction
//! set is enabled.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::{OP, Rope, RopeArgs, RopeStyle};
use crate::element::{Element, load_some};
use crate::gpu::Kind;
use crate::operand::{Operand, TensorView};
use crate::simd::{Isa, LANES, Lanes, vectorised};
use crate::storage::{Parts, ensure, read, shape, unsupported, write, write_as};
use crate::{Compute, Result};
use half::f16;

/// With fewer values than this, waking a thread costs more than it saves.
const VALUES_PER_TASK: usize = 16 * 1024;

impl Rope for Compute {
    fn rope_kv_write(&self, args: &RopeArgs<TensorView>) -> Result<()> {
        args.check()?;
        check_indices(args)?;
        match args.k_cache.kind() {
            Kind::F32 => run::<f32>(self, args),
            Kind::F16 => run::<f16>(self, args),
            _ => Err(unsupported(OP, args.k_cache)),
        }
    }
}

fn run<E: Element>(c: &Compute, args: &RopeArgs<TensorView>) -> Result<()> {
    let (cos, sin) = (read(OP, args.table.cos)?, read(OP, args.table.sin)?);
    let norm = match args.qk_norm {
        Some(norm) => Some((read(OP, norm.q)?, read(OP, norm.k)?, norm.eps)),
        None => None,
    };
    let heads = Heads {
        q: args.heads,
        kv: args.kv_heads,
        dim: args.head_dim,
        style: args.table.style,
        norm: norm.as_ref().map(|(q, k, eps)| (&**q, &**k, *eps)),
    };
    let (half, block_size) = (args.table.rotary_dim / 2, args.block_size);
    let width = (args.heads + 2 * args.kv_heads) * args.head_dim;
    let (n, rows) = (args.positions.len(), (VALUES_PER_TASK / width.max(1)).max(1));
    write(OP, args.qkv, |qkv| {
        write_as::<E>(OP, args.k_cache, |k_cache| {
            write_as::<E>(OP, args.v_cache, |v_cache| {
                let qkv = Parts::new(qkv);
                let cache = Cache { k: Parts::new(k_cache), v: Parts::new(v_cache), block_size };
                c.run(n.div_ceil(rows), |task| {
                    for i in task * rows..n.min((task + 1) * rows) {
                        let position = args.positions[i] as usize;
                        let angles = position * half..(position + 1) * half;
                        let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
                        // SAFETY: each row belongs to one task.
                        let qkv = unsafe { qkv.slice(i * width..(i + 1) * width) };
                        // `check_indices` found every slot once.
                        let slot = args.slots[i] as usize;
                        token(Isa::best(), &heads, cos, sin, qkv, &cache, slot);
                    }
                });
                Ok(())
            })
        })
    })
}

/// Checks everything that an index could reach before anything is written: a wrong slot is another
/// sequence's memory.
fn check_indices(args: &RopeArgs<TensorView>) -> Result<()> {
    let half = args.table.rotary_dim / 2;
    let positions = args.table.cos.len().checked_div(half).unwrap_or(usize::MAX);
    let beyond = args.positions.iter().find(|position| **position as usize >= positions);
    ensure(OP, beyond.is_none(), || {
        format!("position {beyond:?} is beyond the table's {positions}")
    })?;
    let mut slots = args.slots.to_vec();
    slots.sort_unstable();
    if let Some(slot) = slots.windows(2).find_map(|w| (w[0] == w[1]).then_some(w[0])) {
        return Err(shape(OP, format!("slot {slot} is given to two tokens")));
    }
    let cached = args.k_cache.len() / (args.kv_heads * args.head_dim);
    let last = slots.last().filter(|last| **last as usize >= cached);
    ensure(OP, last.is_none(), || format!("slot {last:?} is beyond the cache's {cached}"))
}

pub(super) struct Heads<'a> {
    pub q: usize,
    pub kv: usize,
    pub dim: usize,
    pub style: RopeStyle,
    /// RMSNorm weights of Q and K heads, and epsilon.
    pub norm: Option<(&'a [f32], &'a [f32], f32)>,
}

/// The places to which keys and values are written.
pub(super) struct Cache<'a, E> {
    /// `[blocks, kv_heads, head_dim, block_size]`.
    pub k: Parts<'a, E>,
    /// `[blocks, kv_heads, block_size, head_dim]`.
    pub v: Parts<'a, E>,
    pub block_size: usize,
}

vectorised! {
    /// `qkv`: one token's projections; `cos`, `sin`: its angles. No other thread may write this
    /// slot.
    pub(super) fn token<E: Element>(
        heads: &Heads, cos: &[f32], sin: &[f32], qkv: &mut [f32], cache: &Cache<E>, slot: usize
    ) = token_with
}

#[inline(always)]
fn token_with<L: Lanes, E: Element>(
    heads: &Heads,
    cos: &[f32],
    sin: &[f32],
    qkv: &mut [f32],
    cache: &Cache<E>,
    slot: usize,
) {
    let (q, kv) = qkv.split_at_mut(heads.q * heads.dim);
    let (k, v) = kv.split_at_mut(heads.kv * heads.dim);
    rotate_heads(heads, heads.norm.map(|(q, _, eps)| (q, eps)), cos, sin, q);
    rotate_heads(heads, heads.norm.map(|(_, k, eps)| (k, eps)), cos, sin, k);
    let (block, offset) = (slot / cache.block_size, slot % cache.block_size);
    for (head, (k, v)) in k.chunks_exact(heads.dim).zip(v.chunks_exact(heads.dim)).enumerate() {
        let start = (block * heads.kv + head) * cache.block_size * heads.dim;
        let values = start + offset * heads.dim;
        // SAFETY: the slot is this token's alone.
        let out = unsafe { cache.v.slice(values..values + heads.dim) };
        for ((k, v), (i, out)) in
            k.chunks(LANES).zip(v.chunks(LANES)).zip(out.chunks_mut(LANES).enumerate())
        {
            let (mut keys, mut values) = ([E::default(); LANES], [E::default(); LANES]);
            E::store(load_some::<L, f32>(k), &mut keys);
            E::store(load_some::<L, f32>(v), &mut values);
            out.copy_from_slice(&values[..out.len()]);
            for (d, key) in keys.into_iter().take(k.len()).enumerate() {
                let at = start + (i * LANES + d) * cache.block_size + offset;
                // SAFETY: as above.
                unsafe { cache.k.slice(at..at + 1)[0] = key };
            }
        }
    }
}

#[inline(always)]
fn rotate_heads(
    heads: &Heads,
    norm: Option<(&[f32], f32)>,
    cos: &[f32],
    sin: &[f32],
    data: &mut [f32],
) {
    for head in data.chunks_exact_mut(heads.dim) {
        if let Some((weight, eps)) = norm {
            normalise(head, weight, eps);
        }
        let rotary = &mut head[..2 * cos.len()];
        match heads.style {
            RopeStyle::Neox => rotate_halves(rotary, cos, sin),
            RopeStyle::Interleaved => rotate_pairs(rotary, cos, sin),
        }
    }
}

#[inline(always)]
fn rotate_halves(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((x, y), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*x, *y) = (*x * c - *y * s, *y * c + *x * s);
    }
}

#[inline(always)]
fn rotate_pairs(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (pairs, _) = head.as_chunks_mut::<2>();
    for (([x, y], c), s) in pairs.iter_mut().zip(cos).zip(sin) {
        (*x, *y) = (*x * c - *y * s, *y * c + *x * s);
    }
}

#[inline(always)]
fn normalise(head: &mut [f32], weight: &[f32], eps: f32) {
    let mean = head.iter().map(|x| x * x).sum::<f32>() / head.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for (x, w) in head.iter_mut().zip(weight) {
        *x *= scale * w;
    }
}

//! RoPE on the CPU, one token at a time: the compiler vectorises these loops once the instruction
//! set is enabled.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::rotation::{VALUES_PER_TASK, check_indices, rotate, store_key};
use super::{OP, QkNorm, Rope, RopeArgs, RopeLatentArgs, latent};
use crate::element::{Element, load_some};
use crate::gpu::Kind;
use crate::operand::{Operand, TensorView};
use crate::parts::Parts;
use crate::simd::{Isa, LANES, Lanes, vectorised};
use crate::storage::{read, write, wrong_type};
use crate::{Compute, Result};
use half::f16;

impl Rope for Compute {
    fn rope_kv_write(&self, args: &RopeArgs<TensorView>) -> Result<()> {
        args.check()?;
        // Without heads of K, nothing is written to a slot.
        let width = args.kv_heads * args.head_dim;
        let (slots, cached) =
            args.k_cache.len().checked_div(width).map_or((&[][..], 0), |count| (args.slots, count));
        check_indices(OP, args.positions, slots, &args.table, cached)?;
        match args.k_cache.kind() {
            Kind::F32 => run::<f32>(self, args),
            Kind::F16 => run::<f16>(self, args),
            _ => Err(wrong_type(OP, args.k_cache)),
        }
    }

    fn rope_latent(&self, args: &RopeLatentArgs<TensorView>) -> Result<()> {
        latent::run(self, args)
    }
}

fn run<E: Element>(c: &Compute, args: &RopeArgs<TensorView>) -> Result<()> {
    let (cos, sin) = (read::<f32>(OP, args.table.cos)?, read::<f32>(OP, args.table.sin)?);
    let norms = match args.qk_norm {
        Some(norm) => Some([read::<f32>(OP, norm.q)?, read::<f32>(OP, norm.k)?]),
        None => None,
    };
    let norms = norms.as_ref().map(|norms| norms.each_ref().map(|weights| &**weights));
    let scales = args.table.query_scales.map(|scales| read::<f32>(OP, scales)).transpose()?;
    let half = args.table.rotary_dim / 2;
    let width = (args.heads + 2 * args.kv_heads) * args.head_dim;
    let rows = (VALUES_PER_TASK / width).max(1);
    write(OP, args.qkv, |qkv: &mut [f32]| {
        write(OP, args.k_cache, |k_cache: &mut [E]| {
            write(OP, args.v_cache, |v_cache: &mut [E]| {
                let cache = Cache { k: Parts::new(k_cache), v: Parts::new(v_cache) };
                c.run_chunks(qkv, rows * width, |start, qkv| {
                    for (i, qkv) in (start / width..).zip(qkv.chunks_exact_mut(width)) {
                        let position = args.positions[i] as usize;
                        let angles = position * half..(position + 1) * half;
                        let angles = [&cos[angles.clone()], &sin[angles]];
                        // `check_indices` found every slot once.
                        let slot = args.slots[i] as usize;
                        token(Isa::best(), args, norms, angles, qkv, &cache, slot);
                        if let Some(scales) = &scales {
                            for q in &mut qkv[..args.heads * args.head_dim] {
                                *q *= scales[position];
                            }
                        }
                    }
                });
            })
        })
    })??
}

/// The places to which keys and values are written.
struct Cache<'a, E> {
    /// `[blocks, kv_heads, head_dim, block_size]`.
    k: Parts<'a, E>,
    /// `[blocks, kv_heads, block_size, head_dim]`.
    v: Parts<'a, E>,
}

vectorised! {
    /// `norms`: the weights for heads of Q and of K; `angles`: the cosines and sines of the token's
    /// position; `qkv`: its projections. No other thread may write this slot.
    fn token<E: Element>(
        args: &RopeArgs<TensorView>,
        norms: Option<[&[f32]; 2]>,
        angles: [&[f32]; 2],
        qkv: &mut [f32],
        cache: &Cache<E>,
        slot: usize,
    ) = token_with
}

#[inline(always)]
fn token_with<L: Lanes, E: Element>(
    args: &RopeArgs<TensorView>,
    norms: Option<[&[f32]; 2]>,
    angles: [&[f32]; 2],
    qkv: &mut [f32],
    cache: &Cache<E>,
    slot: usize,
) {
    let &RopeArgs { heads, kv_heads, head_dim: dim, block_size, .. } = args;
    let (q, kv) = qkv.split_at_mut(heads * dim);
    let (k, v) = kv.split_at_mut(kv_heads * dim);
    rotate_heads(args, norms.map(|[q, _]| q), angles, q);
    rotate_heads(args, norms.map(|[_, k]| k), angles, k);
    let (block, offset) = (slot / block_size, slot % block_size);
    for (head, (k, v)) in k.chunks_exact(dim).zip(v.chunks_exact(dim)).enumerate() {
        let start = (block * kv_heads + head) * block_size * dim;
        let values = start + offset * dim;
        // SAFETY: the slot is this token's alone.
        let out = unsafe { cache.v.slice(values..values + dim) };
        for (v, out) in v.chunks(LANES).zip(out.chunks_mut(LANES)) {
            let mut values = [E::default(); LANES];
            E::store(load_some::<L, f32>(v), &mut values);
            out.copy_from_slice(&values[..out.len()]);
        }
        // SAFETY: as above.
        unsafe { store_key::<L, E>(k, &cache.k, start + offset, block_size) };
    }
}

#[inline(always)]
fn rotate_heads(
    args: &RopeArgs<TensorView>,
    norm: Option<&[f32]>,
    [cos, sin]: [&[f32]; 2],
    data: &mut [f32],
) {
    for head in data.chunks_exact_mut(args.head_dim) {
        if let (Some(weight), Some(QkNorm { eps, .. })) = (norm, args.qk_norm) {
            normalise(head, weight, eps);
        }
        rotate(args.table.style, &mut head[..2 * cos.len()], cos, sin);
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

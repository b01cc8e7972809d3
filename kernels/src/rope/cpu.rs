//! One token at a time: loops that the compiler vectorises once the instruction set is enabled.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::RopeStyle;
use crate::element::{Element, load_some};
use crate::simd::{LANES, Lanes, vectorised};
use crate::storage::Parts;

pub(super) struct Heads<'a> {
    pub q: usize,
    pub kv: usize,
    pub dim: usize,
    pub style: RopeStyle,
    /// RMSNorm weights of Q and K heads, and epsilon.
    pub norm: Option<(&'a [f32], &'a [f32], f32)>,
}

/// Where keys and values go.
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

//! One token at a time: loops that the compiler vectorises once the instruction set is enabled.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::RopeStyle;
use crate::simd::{Lanes, vectorised};

pub(super) struct Heads<'a> {
    pub q: usize,
    pub kv: usize,
    pub dim: usize,
    pub style: RopeStyle,
    /// RMSNorm weights of Q and K heads, and epsilon.
    pub norm: Option<(&'a [f32], &'a [f32], f32)>,
}

vectorised! {
    /// `qkv`: one token's projections; `k`, `v`: its slot, `[kv_heads, head_dim]`; `cos`, `sin`: its angles.
    pub(super) fn token(heads: &Heads, cos: &[f32], sin: &[f32], qkv: &mut [f32], k: &mut [f32], v: &mut [f32]) = token_with
}

#[inline(always)]
fn token_with<L: Lanes>(heads: &Heads, cos: &[f32], sin: &[f32], qkv: &mut [f32], k: &mut [f32], v: &mut [f32]) {
    let (q, kv) = qkv.split_at_mut(heads.q * heads.dim);
    let (k_in, v_in) = kv.split_at(heads.kv * heads.dim);
    k.copy_from_slice(k_in);
    v.copy_from_slice(v_in);
    rotate_heads(heads, heads.norm.map(|(q, _, eps)| (q, eps)), cos, sin, q);
    rotate_heads(heads, heads.norm.map(|(_, k, eps)| (k, eps)), cos, sin, k);
}

#[inline(always)]
fn rotate_heads(heads: &Heads, norm: Option<(&[f32], f32)>, cos: &[f32], sin: &[f32], data: &mut [f32]) {
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

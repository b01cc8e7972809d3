//! Both activations are `x · sigmoid(z(x))`: SiLU with z = x, tanh-GELU with z = 2·√(2/π)·(x +
//! 0.044715·x³).

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::Activation;
use crate::simd::{self, LANES, Lanes, vectorised};
use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

const MINUS_2_SQRT_2_OVER_PI: f32 = -2.0 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2;

vectorised! {
    pub(super) fn gated_row(act: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) = gated
}

vectorised! {
    pub(super) fn soft_cap(cap: f32, values: &mut [f32]) = capped
}

#[inline(always)]
fn capped<L: Lanes>(cap: f32, values: &mut [f32]) {
    let (vectors, rest) = values.as_chunks_mut::<LANES>();
    for x in vectors {
        simd::soft_cap(L::load(x), cap).store(x);
    }
    let mut last = [0.0; LANES];
    last[..rest.len()].copy_from_slice(rest);
    let last = simd::soft_cap(L::load(&last), cap).to_array();
    rest.copy_from_slice(&last[..rest.len()]);
}

#[inline(always)]
fn gated<L: Lanes>(act: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    let (outs, out_rest) = out.as_chunks_mut::<LANES>();
    let (gates, gate_rest) = gate.as_chunks::<LANES>();
    let (ups, up_rest) = up.as_chunks::<LANES>();
    for ((out, gate), up) in outs.iter_mut().zip(gates).zip(ups) {
        activate(act, L::load(gate)).mul(L::load(up)).store(out);
    }
    let mut last = [0.0; LANES];
    last[..gate_rest.len()].copy_from_slice(gate_rest);
    let last = activate(act, L::load(&last)).to_array();
    for ((out, a), up) in out_rest.iter_mut().zip(last).zip(up_rest) {
        *out = a * up;
    }
}

#[inline(always)]
fn activate<L: Lanes>(act: Activation, x: L) -> L {
    let one = L::splat(1.0);
    let minus_z = match act {
        Activation::Silu => x.mul(L::splat(-1.0)),
        Activation::GeluTanh => {
            let cubic = x.mul(x).mul_add(L::splat(0.044_715), one);
            x.mul(cubic).mul(L::splat(MINUS_2_SQRT_2_OVER_PI))
        }
    };
    x.div(minus_z.exp().add(one))
}

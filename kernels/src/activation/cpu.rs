//! All activations are `x · sigmoid(z(x))`: SiLU with z = x, tanh-GELU with z = 2·√(2/π)·(x +
//! 0.044715·x³), the clamped SwiGLU with z = alpha·x.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::args::{GATE, OP};
use super::{Activation, GateArgs, Gated, GatedArgs, SoftCap};
use crate::element::load_some;
use crate::operand::TensorView;
use crate::simd::{self, Isa, LANES, Lanes, vectorised};
use crate::storage::{read, write};
use crate::{Compute, Result};
use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// With fewer outputs than this, waking a thread costs more than it saves.
const OUTPUTS_PER_TASK: usize = 8 * 1024;

impl Gated for Compute {
    fn gated(&self, args: &GatedArgs<TensorView>) -> Result<()> {
        args.check()?;
        let &GatedArgs { activation, gate_up, width: d, out, .. } = args;
        let gate_up = read::<f32>(OP, gate_up)?;
        let rows = (OUTPUTS_PER_TASK / d).max(1);
        write(OP, out, |out: &mut [f32]| {
            self.run_chunks(out, rows * d, |start, out| {
                let gate_up = gate_up[2 * start..].chunks_exact(2 * d);
                for (gate_up, out) in gate_up.zip(out.chunks_exact_mut(d)) {
                    let (gate, up) = gate_up.split_at(d);
                    gated_row(Isa::best(), activation, gate, up, out);
                }
            });
        })
    }

    fn gate(&self, args: &GateArgs<TensorView>) -> Result<()> {
        args.check()?;
        let gate = read::<f32>(GATE, args.gate)?;
        write(GATE, args.x, |x: &mut [f32]| {
            self.run_chunks(x, OUTPUTS_PER_TASK, |start, x| {
                sigmoid_gate(Isa::best(), &gate[start..start + x.len()], x);
            });
        })
    }
}

impl SoftCap for Compute {
    fn soft_cap(&self, values: TensorView, cap: f32) -> Result<()> {
        write("soft_cap", values, |values: &mut [f32]| {
            self.run_chunks(values, OUTPUTS_PER_TASK, |_, values| {
                soft_cap(Isa::best(), cap, values);
            });
        })
    }
}

const MINUS_2_SQRT_2_OVER_PI: f32 = -2.0 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2;

vectorised! {
    pub(crate) fn gated_row(act: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) = gated
}

vectorised! {
    fn sigmoid_gate(gate: &[f32], x: &mut [f32]) = gate_values
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
    let last = simd::soft_cap(load_some::<L, f32>(rest), cap).to_array();
    rest.copy_from_slice(&last[..rest.len()]);
}

#[inline(always)]
fn gate_values<L: Lanes>(gate: &[f32], x: &mut [f32]) {
    let one = L::splat(1.0);
    for (x, gate) in x.chunks_mut(LANES).zip(gate.chunks(LANES)) {
        let growth = load_some::<L, f32>(gate).mul(L::splat(-1.0)).exp();
        let gated = load_some::<L, f32>(x).div(growth.add(one)).to_array();
        x.copy_from_slice(&gated[..x.len()]);
    }
}

/// SiLU of each value, in place.
#[inline(always)]
pub(crate) fn silu<L: Lanes>(values: &mut [f32]) {
    for x in values.chunks_mut(LANES) {
        let activated = activate(Activation::Silu, load_some::<L, f32>(x)).to_array();
        x.copy_from_slice(&activated[..x.len()]);
    }
}

#[inline(always)]
fn gated<L: Lanes>(act: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    let (outs, out_rest) = out.as_chunks_mut::<LANES>();
    let (gates, gate_rest) = gate.as_chunks::<LANES>();
    let (ups, up_rest) = up.as_chunks::<LANES>();
    for ((out, gate), up) in outs.iter_mut().zip(gates).zip(ups) {
        gate_vector(act, L::load(gate), L::load(up)).store(out);
    }
    let last = gate_vector::<L>(act, load_some(gate_rest), load_some(up_rest)).to_array();
    out_rest.copy_from_slice(&last[..out_rest.len()]);
}

#[inline(always)]
fn gate_vector<L: Lanes>(act: Activation, gate: L, up: L) -> L {
    let Activation::ClampedSwiglu { limit, .. } = act else {
        return activate(act, gate).mul(up);
    };
    let up = at_most(L::splat(-limit).max(up), limit).add(L::splat(1.0));
    activate(act, at_most(gate, limit)).mul(up)
}

/// The smaller of each value and `limit`; NaN stays NaN.
#[inline(always)]
fn at_most<L: Lanes>(x: L, limit: f32) -> L {
    let minus = L::splat(-1.0);
    L::splat(-limit).max(x.mul(minus)).mul(minus)
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
        Activation::ClampedSwiglu { alpha, .. } => x.mul(L::splat(-alpha)),
    };
    x.div(minus_z.exp().add(one))
}

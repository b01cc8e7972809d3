//! The arguments of gated activations.

use super::Activation;
use crate::Result;
use crate::error::ensure;
use crate::gpu::Kind;
use crate::operand::{Operand, distinct, is_activation};

pub(super) const OP: &str = "gated";
pub(super) const GATE: &str = "gate";

/// `out = activation(gate) * up`; [`Activation::ClampedSwiglu`] changes `up` too.
#[derive(Clone, Copy, Debug)]
pub struct GatedArgs<V> {
    pub activation: Activation,
    /// `[n, 2 * width]` activations (f32 or, on a device, bf16): the gate first, then up.
    pub gate_up: V,
    pub width: usize,
    /// `[n, width]` of the same kind; it shares no memory with `gate_up`.
    pub out: V,
    /// Whether rows of bf16 on a device, whose width is a multiple of 8, are rounded as
    /// [`rounded_linear`](crate::linear::Linear::rounded_linear) takes them.
    pub rounded: bool,
}

impl<V: Operand> GatedArgs<V> {
    pub(super) fn check(&self) -> Result<()> {
        let &Self { gate_up, width, out, rounded, .. } = self;
        let fits = is_activation(out.kind())
            && gate_up.kind() == out.kind()
            && gate_up.len() == 2 * out.len()
            && width > 0
            && out.len().is_multiple_of(width)
            && (!rounded || out.kind() == Kind::Bf16 && width.is_multiple_of(8));
        ensure(OP, fits, || format!("{gate_up:?} and {out:?} for a width of {width}"))?;
        distinct(OP, out, &[gate_up])
    }
}

/// `x = x * sigmoid(gate)`, in place.
#[derive(Clone, Copy, Debug)]
pub struct GateArgs<V> {
    /// Activations (f32 or, on a device, bf16).
    pub x: V,
    /// As many of the same kind; it shares no memory with `x`.
    pub gate: V,
}

impl<V: Operand> GateArgs<V> {
    pub(super) fn check(&self) -> Result<()> {
        let &Self { x, gate } = self;
        let fits = is_activation(x.kind()) && gate.kind() == x.kind() && gate.len() == x.len();
        ensure(GATE, fits, || format!("{x:?} gated by {gate:?}"))?;
        distinct(GATE, x, &[gate])
    }
}

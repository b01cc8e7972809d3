//! The arguments of products with factors.

use crate::Result;
use crate::activation::Activation;
use crate::error::ensure;
use crate::experts::Routes;
use crate::gpu::Kind;
use crate::operand::{Operand, distinct, is_activation};

pub(super) const SCALE: &str = "scale";
pub(super) const INPUT: &str = "layer input";
pub(super) const CHOICES: &str = "choice factors";

/// `x = x * factor`, in place.
#[derive(Clone, Copy, Debug)]
pub struct ScaleArgs<V> {
    /// Activations (f32 or, on a device, bf16).
    pub x: V,
    /// `[1]` f32; it shares no memory with `x`.
    pub factor: V,
}

impl<V: Operand> ScaleArgs<V> {
    pub(super) fn check(&self) -> Result<()> {
        let &Self { x, factor } = self;
        let fits = is_activation(x.kind()) && factor.kind() == Kind::F32 && factor.len() == 1;
        ensure(SCALE, fits, || format!("{x:?} by {factor:?}"))?;
        distinct(SCALE, x, &[factor])
    }
}

/// `out = activation(gate) * inputs`, of whose columns some neighbouring ones are read.
#[derive(Clone, Copy, Debug)]
pub struct LayerInputArgs<V> {
    pub activation: Activation,
    /// `[n, width]` activations (f32 or, on a device, bf16).
    pub gate: V,
    /// `[n, stride]` of the same kind.
    pub inputs: V,
    pub stride: usize,
    /// The first column of `inputs` that is read.
    pub first: usize,
    pub width: usize,
    /// `[n, width]` of the same kind; it shares no memory with the others.
    pub out: V,
}

impl<V: Operand> LayerInputArgs<V> {
    pub(super) fn check(&self) -> Result<()> {
        let &Self { gate, inputs, stride, first, width, out, .. } = self;
        let fits = is_activation(out.kind())
            && [gate, inputs].iter().all(|other| other.kind() == out.kind())
            && width > 0
            && first + width <= stride
            && gate.len() == out.len()
            && out.len().is_multiple_of(width)
            && inputs.len() == out.len() / width * stride;
        ensure(INPUT, fits, || {
            format!("{gate:?} and {out:?} for {width} columns of {inputs:?} from {first} on")
        })?;
        distinct(INPUT, out, &[gate, inputs])
    }
}

/// `routes.weights[i, j] *= factors[the expert of choice j of row i]`
#[derive(Clone, Copy, Debug)]
pub struct ChoiceFactorsArgs<V> {
    /// Its weights are changed in place.
    pub routes: Routes<V>,
    /// `[experts]` f32; they share no memory with the weights.
    pub factors: V,
}

impl<V: Operand> ChoiceFactorsArgs<V> {
    pub(super) fn check(&self) -> Result<()> {
        let &Self { routes: Routes { experts, chosen, weights, plan }, factors } = self;
        let n = weights.len() / chosen.max(1);
        let fits = factors.kind() == Kind::F32
            && factors.len() == experts
            && weights.kind() == Kind::F32
            && weights.len() == n * chosen
            && plan.kind() == Kind::U32
            && plan.len() == Routes::<V>::plan_len(n, experts, chosen);
        ensure(CHOICES, fits, || format!("{weights:?} and {plan:?} by {factors:?}"))?;
        distinct(CHOICES, weights, &[plan, factors])
    }
}

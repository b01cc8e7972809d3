//! The arguments of the norm.

use crate::Result;
use crate::gpu::Kind;
use crate::operand::{Operand, distinct, is_activation};
use crate::storage::ensure;

pub(super) const OP: &str = "rms_norm";

/// `out[i] = x[i] / sqrt(mean(x[i]²) + eps) * weight`; with `delta`, `x += delta` comes first.
#[derive(Clone, Copy, Debug)]
pub struct NormArgs<V> {
    /// `[n, width]` activations (f32 or, on a device, bf16), as `delta` and `out`. Changed in place
    /// if there is a `delta`.
    pub x: V,
    pub delta: Option<V>,
    /// `[width]` f32.
    pub weight: V,
    pub eps: f32,
    /// `[n, width]`; it shares no memory with `x` or `delta`.
    pub out: V,
}

impl<V: Operand> NormArgs<V> {
    pub(super) fn check(&self) -> Result<()> {
        let &Self { x, delta, weight, out, .. } = self;
        let like_x = |other: V| other.len() == x.len() && other.kind() == x.kind();
        let fits = is_activation(x.kind())
            && weight.kind() == Kind::F32
            && !weight.is_empty()
            && x.len().is_multiple_of(weight.len())
            && like_x(out)
            && delta.is_none_or(like_x);
        ensure(OP, fits, || {
            format!("{x:?}, {delta:?} and {out:?} for a width of {}", weight.len())
        })?;
        distinct(OP, out, &[x])?;
        delta.map_or(Ok(()), |delta| distinct(OP, delta, &[x, out]))
    }
}

//! The arguments of the norms.

use crate::Result;
use crate::error::ensure;
use crate::gpu::Kind;
use crate::operand::{Operand, distinct, is_activation};

pub(super) const OP: &str = "rms_norm";
pub(super) const ADD: &str = "add_normed";
pub(super) const COLUMNS: &str = "norm_columns";

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
    /// `[n, width]` bf16 on a device, for a width that is a multiple of 8: the values of `out` as
    /// [`rounded_linear`](crate::linear::Linear::rounded_linear) takes them. It shares no memory
    /// with the others.
    pub rounded: Option<V>,
}

impl<V: Operand> NormArgs<V> {
    pub(super) fn check(&self) -> Result<()> {
        let &Self { x, delta, weight, out, rounded, .. } = self;
        let like_x = |other: V| other.len() == x.len() && other.kind() == x.kind();
        let fits = is_activation(x.kind())
            && weight.kind() == Kind::F32
            && !weight.is_empty()
            && x.len().is_multiple_of(weight.len())
            && like_x(out)
            && delta.is_none_or(like_x)
            && rounded.is_none_or(|rounded| {
                like_x(rounded) && x.kind() == Kind::Bf16 && weight.len().is_multiple_of(8)
            });
        ensure(OP, fits, || {
            format!("{x:?}, {delta:?}, {out:?} and {rounded:?} for a width of {}", weight.len())
        })?;
        distinct(OP, out, &[x])?;
        delta.map_or(Ok(()), |delta| distinct(OP, delta, &[x, out]))?;
        let rounded = rounded.map(|rounded| distinct(OP, rounded, &[x, out, delta.unwrap_or(x)]));
        rounded.unwrap_or(Ok(()))
    }
}

/// `x[i] += delta[i] / sqrt(mean(delta[i]²) + eps) * weight`
#[derive(Clone, Copy, Debug)]
pub struct AddNormedArgs<V> {
    /// `[n, width]` activations (f32 or, on a device, bf16), changed in place.
    pub x: V,
    /// `[n, width]` of the same kind; it shares no memory with `x`.
    pub delta: V,
    /// `[width]` f32.
    pub weight: V,
    pub eps: f32,
}

impl<V: Operand> AddNormedArgs<V> {
    pub(super) fn check(&self) -> Result<()> {
        let &Self { x, delta, weight, .. } = self;
        let fits = is_activation(x.kind())
            && weight.kind() == Kind::F32
            && !weight.is_empty()
            && x.len().is_multiple_of(weight.len())
            && delta.len() == x.len()
            && delta.kind() == x.kind();
        ensure(ADD, fits, || format!("{x:?} and {delta:?} for a width of {}", weight.len()))?;
        distinct(ADD, x, &[delta, weight])
    }
}

/// The norm of some neighbouring columns of each row, in place; other columns are not touched.
#[derive(Clone, Copy, Debug)]
pub struct NormColumnsArgs<V> {
    /// `[n, stride]` activations (f32 or, on a device, bf16).
    pub x: V,
    pub stride: usize,
    /// The first of the columns.
    pub first: usize,
    /// `[columns]` f32.
    pub weight: V,
    pub eps: f32,
}

impl<V: Operand> NormColumnsArgs<V> {
    pub(super) fn check(&self) -> Result<()> {
        let &Self { x, stride, first, weight, .. } = self;
        let fits = is_activation(x.kind())
            && weight.kind() == Kind::F32
            && !weight.is_empty()
            && first + weight.len() <= stride
            && x.len().is_multiple_of(stride);
        ensure(COLUMNS, fits, || {
            format!("{x:?} of rows of {stride} for {} columns from {first} on", weight.len())
        })?;
        distinct(COLUMNS, x, &[weight])
    }
}

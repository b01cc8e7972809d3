//! The arguments of a product with a weight matrix.

use super::OP;
use crate::Result;
use crate::gpu::Kind;
use crate::operand::{Operand, distinct, is_activation};
use crate::storage::ensure;

/// How the sums of a product may be ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The order that is fastest for this number of rows.
    Fast,
    /// A row's result has the same bits whatever other rows there are. On the CPU that always
    /// holds.
    Invariant,
}

/// `out = x · wᵀ (+ bias)`.
#[derive(Clone, Copy, Debug)]
pub struct LinearArgs<V: Operand> {
    /// `[n, cols]` activations (f32 or, on a device, bf16).
    pub x: V,
    /// `[rows, cols]`: in any format on the CPU; on a device of the kind of `x` or, for bf16, in a
    /// packed form. No launch may write it: a device reads it before earlier launches are over.
    pub w: V::Matrix,
    /// `[rows]` of the kind of `x`.
    pub bias: Option<V>,
    /// `[n, rows]` of the kind of `x`, or f32; it shares no memory with `x` or `bias`.
    pub out: V,
    pub mode: Mode,
}

impl<V: Operand> LinearArgs<V> {
    /// Returns the number of rows of `x`.
    pub(super) fn check(&self) -> Result<usize> {
        let &Self { x, w, bias, out, .. } = self;
        let (rows, cols) = V::shape(w);
        ensure(OP, rows > 0 && cols > 0, || format!("a matrix of {rows} by {cols}"))?;
        let n = x.len() / cols;
        let fits = is_activation(x.kind())
            && (out.kind() == x.kind() || out.kind() == Kind::F32)
            && x.len() == n * cols
            && out.len() == n * rows
            && bias.is_none_or(|bias| bias.len() == rows && bias.kind() == x.kind());
        ensure(OP, fits, || format!("{x:?}, {bias:?} and {out:?} for {rows} by {cols}"))?;
        distinct(OP, out, &[x])?;
        bias.map_or(Ok(()), |bias| distinct(OP, out, &[bias]))?;
        Ok(n)
    }
}

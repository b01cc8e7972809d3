//! The arguments of a product with a weight matrix.

use super::{HEADS, OP};
use crate::Result;
use crate::error::ensure;
use crate::gpu::Kind;
use crate::operand::{Operand, distinct, is_activation};

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

/// `out[i, h] = x[i, h] · w[h]ᵀ`: each head has a matrix of its own.
#[derive(Clone, Copy, Debug)]
pub struct HeadLinearArgs<V: Operand> {
    /// `[n, heads, cols]` activations (f32 or, on a device, bf16).
    pub x: V,
    /// `[heads * rows, cols]`: the heads' matrices, one below the other. On the CPU in any format,
    /// each in parts of its own; on a device of the kind of `x`.
    pub w: V::Matrix,
    pub heads: usize,
    /// `[n, heads, rows]` of the kind of `x`; it shares no memory with `x`.
    pub out: V,
}

impl<V: Operand> HeadLinearArgs<V> {
    /// Returns the number of rows of `x`, all heads of a row being one.
    pub(super) fn check(&self) -> Result<usize> {
        let &Self { x, w, heads, out } = self;
        let (all_rows, cols) = V::shape(w);
        let whole = heads > 0 && all_rows > 0 && cols > 0 && all_rows.is_multiple_of(heads);
        ensure(HEADS, whole, || format!("a matrix of {all_rows} by {cols} for {heads} heads"))?;
        let n = x.len() / (heads * cols);
        let fits = is_activation(x.kind())
            && out.kind() == x.kind()
            && x.len() == n * heads * cols
            && out.len() == n * all_rows;
        ensure(HEADS, fits, || format!("{x:?} and {out:?} for {heads} heads of {cols} columns"))?;
        distinct(HEADS, out, &[x])?;
        Ok(n)
    }
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

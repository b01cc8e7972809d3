//! The arguments of look-ups of rows.

use crate::Result;
use crate::error::ensure;
use crate::operand::{Operand, distinct, is_activation};

/// `out[i] = table[ids[i]] * scale`.
#[derive(Clone, Copy, Debug)]
pub struct GatherArgs<V: Operand> {
    /// `[vocab_size, width]`.
    pub table: V::Matrix,
    /// `[n]` token ids below `vocab_size`.
    pub ids: V::Indices,
    /// Further work of a device with the ids. On the CPU the host does it.
    pub device: Option<DeviceTokens<V::Indices>>,
    /// Every value is multiplied by this: 1 except in families that scale embeddings (Gemma).
    pub scale: f32,
    /// `[n, width]`: f32 on the CPU, of the table's kind on a device.
    pub out: V,
}

/// Token ids that are known on the device before the host has seen them, and a record of all ids
/// beside their K and V.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTokens<I> {
    /// `[n]`: if the i-th value is not `u32::MAX`, it is the index into `previous` of the i-th id,
    /// which then replaces `ids[i]`.
    pub feedback: I,
    /// The tokens of the previous step; any number of them.
    pub previous: I,
    /// `[n]`: places in `history` to which the ids are written.
    pub slots: I,
    /// Any number of places.
    pub history: I,
}

/// `out[i] = x[rows[i]]`.
#[derive(Clone, Copy, Debug)]
pub struct SelectRowsArgs<V: Operand> {
    /// `[n, width]` activations (f32 or, on a device, bf16).
    pub x: V,
    pub width: usize,
    /// Row numbers below n.
    pub rows: V::Indices,
    /// `[rows, width]` of the same kind; it shares no memory with `x`.
    pub out: V,
}

impl<V: Operand> GatherArgs<V> {
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        let &Self { table, ids, device, out, .. } = self;
        let (_, width) = V::shape(table);
        let fits = is_activation(out.kind())
            && width > 0
            && V::count(ids).is_some_and(|n| out.len() == n * width);
        ensure(op, fits, || format!("{ids:?} and {out:?} for a width of {width}"))?;
        let device_fits =
            device.is_none_or(|DeviceTokens { feedback, previous, slots, history }| {
                [feedback, slots].iter().all(|words| V::count(*words) == V::count(ids))
                    && [previous, history].iter().all(|words| V::count(*words).is_some())
            });
        ensure(op, device_fits, || format!("{ids:?} beside {device:?}"))
    }
}

impl<V: Operand> SelectRowsArgs<V> {
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        let &Self { x, width, rows, out } = self;
        let fits = is_activation(x.kind())
            && out.kind() == x.kind()
            && width > 0
            && x.len().is_multiple_of(width)
            && V::count(rows).is_some_and(|n| out.len() == n * width);
        ensure(op, fits, || format!("{x:?}, {rows:?} and {out:?} for a width of {width}"))?;
        distinct(op, out, &[x])
    }
}

//! What both forms of RoPE on the CPU share: checks, the rotation, and keys in the cache.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::{RopeStyle, RopeTable};
use crate::Result;
use crate::element::{Element, load_some};
use crate::error::{ensure, shape};
use crate::operand::{Operand, TensorView};
use crate::parts::Parts;
use crate::simd::{LANES, Lanes};

/// With fewer values than this, waking a thread costs more than it saves.
pub(super) const VALUES_PER_TASK: usize = 16 * 1024;

/// Checks everything that an index could reach before anything is written: a wrong slot is another
/// sequence's memory. `cached`: the slots that there are.
pub(super) fn check_indices(
    op: &'static str,
    positions: &[u32],
    slots: &[u32],
    table: &RopeTable<TensorView>,
    cached: usize,
) -> Result<()> {
    let count = table.cos.len().checked_div(table.rotary_dim / 2).unwrap_or(usize::MAX);
    let beyond = positions.iter().find(|position| **position as usize >= count);
    ensure(op, beyond.is_none(), || format!("position {beyond:?} is beyond the table's {count}"))?;
    let mut slots = slots.to_vec();
    slots.sort_unstable();
    if let Some(slot) = slots.windows(2).find_map(|w| (w[0] == w[1]).then_some(w[0])) {
        return Err(shape(op, format!("slot {slot} is given to two tokens")));
    }
    let last = slots.last().filter(|last| **last as usize >= cached);
    ensure(op, last.is_none(), || format!("slot {last:?} is beyond the cache's {cached}"))
}

/// Writes a key from place `at` of the cache on, one value in each `stride`.
///
/// # Safety
/// The key's slot is this thread's alone.
#[inline(always)]
pub(super) unsafe fn store_key<L: Lanes, E: Element>(
    key: &[f32],
    cache: &Parts<E>,
    at: usize,
    stride: usize,
) {
    for (i, part) in key.chunks(LANES).enumerate() {
        let mut stored = [E::default(); LANES];
        E::store(load_some::<L, f32>(part), &mut stored);
        for (d, value) in stored.into_iter().take(part.len()).enumerate() {
            let at = at + (i * LANES + d) * stride;
            // SAFETY: the caller's promise.
            unsafe { cache.slice(at..at + 1)[0] = value };
        }
    }
}

#[inline(always)]
pub(super) fn rotate(style: RopeStyle, rotary: &mut [f32], cos: &[f32], sin: &[f32]) {
    match style {
        RopeStyle::Neox => rotate_halves(rotary, cos, sin),
        RopeStyle::Interleaved => rotate_pairs(rotary, cos, sin),
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

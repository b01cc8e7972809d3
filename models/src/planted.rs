//! Faults in the arguments of ops, for proving that checks find them. Each is in force on the
//! thread that computes a step, while the step is launched. Builds without the feature `testing`
//! have none.

use cresset_kernels::rope::{RopeStyle, RopeTable};

/// A wrong argument of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpFault {
    /// Attention weighs a fiftieth too sharply.
    AttentionScale,
    /// A token sees as many before it as a head has dimensions, and no more.
    AttentionWindow,
    /// The norms' epsilon is a thousand times as large.
    Epsilon,
    /// The gated activation is another one.
    Activation,
    /// Queries and keys are rotated in the pairs of the other convention.
    RotationPairs,
    /// No fault: what ops write is rounded to bf16, but for the logits.
    Bf16,
}

/// A table whose pairs are those of the other convention.
pub(crate) fn other_pairs<V: Copy>(table: &RopeTable<V>) -> RopeTable<V> {
    let style = match table.style {
        RopeStyle::Neox => RopeStyle::Interleaved,
        RopeStyle::Interleaved => RopeStyle::Neox,
    };
    RopeTable { style, ..*table }
}

#[cfg(any(test, feature = "testing"))]
mod in_force {
    use super::OpFault;
    use cresset_kernels::stored_as_bf16;
    use std::cell::Cell;

    thread_local! {
        static FAULT: Cell<Option<OpFault>> = const { Cell::new(None) };
    }

    /// Computes with a fault on this thread.
    pub fn with<T>(fault: OpFault, compute: impl FnOnce() -> T) -> T {
        FAULT.set(Some(fault));
        stored_as_bf16::set(fault == OpFault::Bf16);
        let result = compute();
        stored_as_bf16::set(false);
        FAULT.set(None);
        result
    }

    /// Computes logits, which a device stores in f32.
    pub(crate) fn in_f32<T>(compute: impl FnOnce() -> T) -> T {
        let rounds = stored_as_bf16::set(false);
        let result = compute();
        stored_as_bf16::set(rounds);
        result
    }

    pub(super) fn is(fault: OpFault) -> bool {
        FAULT.get() == Some(fault)
    }
}

#[cfg(any(test, feature = "testing"))]
pub(crate) use in_force::in_f32;
#[cfg(any(test, feature = "testing"))]
pub use in_force::with;

/// The argument of an op: `right`, unless the fault is in force.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn argument<T>(fault: OpFault, right: T, wrong: impl FnOnce(&T) -> T) -> T {
    if in_force::is(fault) { wrong(&right) } else { right }
}

#[cfg(not(any(test, feature = "testing")))]
pub(crate) fn argument<T>(_: OpFault, right: T, _: impl FnOnce(&T) -> T) -> T {
    right
}

#[cfg(not(any(test, feature = "testing")))]
pub(crate) fn in_f32<T>(compute: impl FnOnce() -> T) -> T {
    compute()
}

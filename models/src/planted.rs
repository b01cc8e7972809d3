//! Faults in the arguments of ops, for proving that checks find them. Each is in force on the
//! thread that computes a step, while the step is launched. Builds without the feature `testing`
//! have none.

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
}

#[cfg(any(test, feature = "testing"))]
mod in_force {
    use super::OpFault;
    use std::cell::Cell;

    thread_local! {
        static FAULT: Cell<Option<OpFault>> = const { Cell::new(None) };
    }

    /// Computes with a fault on this thread.
    pub fn with<T>(fault: OpFault, compute: impl FnOnce() -> T) -> T {
        FAULT.set(Some(fault));
        let result = compute();
        FAULT.set(None);
        result
    }

    pub(super) fn is(fault: OpFault) -> bool {
        FAULT.get() == Some(fault)
    }
}

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

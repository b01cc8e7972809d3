//! What the CPU's ops write, rounded to bf16 as a device stores it: an engine of that precision
//! without a device, for tests. Builds without the feature `rounding` round nothing.

#[cfg(feature = "rounding")]
mod in_force {
    use std::cell::Cell;

    thread_local! {
        static IN_FORCE: Cell<bool> = const { Cell::new(false) };
    }

    /// Rounds what the ops that this thread asks for write, or no longer. Returns whether it was
    /// rounded before.
    pub fn set(rounds: bool) -> bool {
        IN_FORCE.replace(rounds)
    }

    pub(crate) fn get() -> bool {
        IN_FORCE.get()
    }
}

#[cfg(feature = "rounding")]
pub use in_force::set;

use crate::element::Stored;

/// Rounds values, if that is in force on this thread.
#[cfg(feature = "rounding")]
pub(crate) fn round(values: &mut [impl Stored]) {
    if in_force::get() {
        for value in values {
            *value = value.as_bf16();
        }
    }
}

#[cfg(not(feature = "rounding"))]
pub(crate) fn round(_: &mut [impl Stored]) {}

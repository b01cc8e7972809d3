//! What went wrong lately, for `cresset status`.

use crate::clock::UnixMillis;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Errors kept.
const KEPT: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub at: UnixMillis,
    /// Name of the model concerned.
    pub model: String,
    pub message: String,
}

#[derive(Debug, Default)]
pub struct Faults(Mutex<VecDeque<Fault>>);

impl Faults {
    pub fn note(&self, fault: Fault) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_front(fault);
        kept.truncate(KEPT);
    }

    /// Newest first.
    pub fn latest(&self) -> Vec<Fault> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept() {
        let faults = Faults::default();
        let fault = |at| Fault { at: UnixMillis(at), model: "m".into(), message: "why".into() };
        (0..40).for_each(|at| faults.note(fault(at)));
        assert_eq!(faults.latest(), (24..40).rev().map(fault).collect::<Vec<_>>());
    }
}

//! The latest failures of generations, for `cresset status`.

use crate::clock::UnixMillis;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Enough for an operator to see whether a failure repeats, and few enough to print.
const KEPT: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecentError {
    pub at: UnixMillis,
    /// Name of the model concerned.
    pub model: String,
    pub message: String,
}

#[derive(Debug, Default)]
pub struct RecentErrors(Mutex<VecDeque<RecentError>>);

impl RecentErrors {
    pub fn note(&self, error: RecentError) {
        let mut kept = self.0.lock();
        kept.push_front(error);
        kept.truncate(KEPT);
    }

    /// Newest first.
    pub fn latest(&self) -> Vec<RecentError> {
        self.0.lock().iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept() {
        let errors = RecentErrors::default();
        let error =
            |at| RecentError { at: UnixMillis(at), model: "m".into(), message: "why".into() };
        (0..40).for_each(|at| errors.note(error(at)));
        assert_eq!(errors.latest(), (24..40).rev().map(error).collect::<Vec<_>>());
    }
}

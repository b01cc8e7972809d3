//! Guesses tokens with a head that the model itself has, and measures what that costs.
//!
//! The head goes on from the states of the step before, so a sequence costs one row of one layer
//! and one of the output matrix for each guess, and needs no text read again.

#![expect(clippy::disallowed_methods, reason = "it measures what a guess costs")]

use super::panics::catch_panic;
use super::runner::Runner;
use super::speculation::{DraftCost, Proposer, Wanted};
use cresset_models::WantedGuesses;
use std::time::Instant;

/// The head of the runner's model.
pub(super) struct OwnHead<'a> {
    pub(super) runner: &'a mut dyn Runner,
    pub(super) cost: &'a mut DraftCost,
}

impl Proposer for OwnHead<'_> {
    fn seconds_per_draft(&self) -> f64 {
        self.cost.seconds()
    }

    fn propose(&mut self, wanted: Vec<Wanted>) -> Vec<Vec<u32>> {
        let (began, sequences) = (Instant::now(), wanted.len());
        let asked = |Wanted { row, blocks, most, .. }| WantedGuesses { row, blocks, most };
        let asked = wanted.into_iter().map(asked).collect();
        match catch_panic(|| self.runner.guess(asked)) {
            Ok(guesses) => {
                let count = guesses.iter().map(Vec::len).sum::<usize>();
                if count > 0 {
                    self.cost.note(began.elapsed().as_secs_f64() / count as f64);
                }
                guesses
            }
            Err(error) => {
                tracing::warn!(reason = %error, "the model's head has failed and guesses no more");
                self.cost.give_up();
                vec![Vec::new(); sequences]
            }
        }
    }
}

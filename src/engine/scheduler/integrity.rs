//! Checks the rules that must hold between any two calls of the scheduler. A violation ends the
//! engine.

use super::{Scheduler, StepRow};
use crate::block_manager::IntegrityError;
use crate::sequence::{Sequence, SequenceState};

impl Scheduler {
    /// Every block is accounted for, every sequence is where its state says, and the rows in flight
    /// are those that the sequences have recorded.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        self.blocks.check_integrity(self.sequences().map(|sequence| &sequence.table))?;
        let broken = self.sequences().find(|sequence| !self.is_consistent(sequence));
        match broken {
            Some(sequence) => Err(IntegrityError(format!("{:?} is misplaced", sequence.id))),
            None if self.running.len() > self.options.max_rows => {
                Err(IntegrityError("more sequences run than a step has rows".into()))
            }
            None => self.check_in_flight(),
        }
    }

    /// The sequences' own counts agree with the steps in flight, and each token that is fed back
    /// belongs to its own sequence.
    fn check_in_flight(&self) -> Result<(), IntegrityError> {
        for sequence in self.sequences() {
            let rows = || self.in_flight.iter().flatten().filter(|row| row.id == sequence.id);
            let (count, sampling) = (rows().count(), rows().filter(|row| row.samples).count());
            let joins = |end, row: &StepRow| (row.end() == end).then_some(row.from);
            // A preempted sequence starts again only when it has no row in flight, so the rows of a
            // running one follow each other without gaps.
            let joined = sequence.state == SequenceState::Waiting
                || rows().rev().try_fold(sequence.num_computed_tokens, joins).is_some();
            if (count, sampling) != (sequence.rows_in_flight, sequence.pending_tokens) || !joined {
                return Err(IntegrityError(format!(
                    "{:?} and its rows in flight do not agree",
                    sequence.id
                )));
            }
        }
        let steps = self.in_flight.iter().zip(self.in_flight.iter().skip(1));
        for (before, step) in steps {
            let results: Vec<_> =
                before.iter().filter(|row| row.samples).map(|row| row.id).collect();
            let fed = |row: &&StepRow| {
                row.feedback.is_some_and(|at| results.get(at as usize) != Some(&row.id))
            };
            if let Some(row) = step.iter().find(fed) {
                return Err(IntegrityError(format!(
                    "{:?} would be fed another sequence's token",
                    row.id
                )));
            }
        }
        Ok(())
    }

    fn is_consistent(&self, sequence: &Sequence) -> bool {
        let queued = self.queue.contains(sequence.request.account, sequence.id);
        let running = self.running.contains(&sequence.id);
        let blocks = sequence.table.len();
        match sequence.state {
            SequenceState::Waiting => {
                // One in the background is taken out of the queue while there are others.
                let queued = queued || sequence.request.background;
                queued && !running && blocks == 0 && sequence.num_computed_tokens == 0
            }
            SequenceState::Running => {
                running
                    && queued != sequence.is_decoding()
                    && blocks >= self.blocks.blocks_for(sequence.num_computed_tokens)
            }
        }
    }
}

//! Finds out from what an engine tells of itself whether it finishes its steps.

use cresset_engine::EngineProgress;
use std::time::Duration;

/// A step may take this many times as long as the slowest one before it.
const SLOWER_THAN_SEEN: u32 = 10;
/// The process ends after this many times the time after which an engine counts as stalled.
const HOPELESS: u32 = 5;
/// Looks at the engines in the time of a stall, and the longest time between two.
const LOOKS: u32 = 10;
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// What the watchdog has seen of one engine's steps.
///
/// Time counts as it passes between two looks, and no look counts for much more than the pause
/// between two: a process that stood still, or a machine that slept, finds no stall when it goes
/// on.
#[derive(Debug, Default)]
pub(super) struct StepWatch {
    ended_steps: u64,
    /// Time that the present step has taken so far.
    waited: Duration,
    /// The longest of the steps that ended.
    slowest: Duration,
    /// What the engine does, since it is stalled.
    pub stalled: Option<String>,
}

/// What one look has found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum StepFinding {
    Nothing,
    Stalls,
    GoesOn,
    Hopeless,
}

impl StepWatch {
    /// Takes in how far the engine has come `passed` after the last look. `patience` is the time of
    /// a stall.
    pub(super) fn look(
        &mut self,
        now: &EngineProgress,
        passed: Duration,
        patience: Duration,
    ) -> StepFinding {
        if now.ended_steps != self.ended_steps || !now.has_work {
            if now.ended_steps != self.ended_steps {
                self.slowest = self.slowest.max(self.waited);
            }
            (self.ended_steps, self.waited) = (now.ended_steps, Duration::ZERO);
            let stalled = self.stalled.take().is_some();
            return if stalled { StepFinding::GoesOn } else { StepFinding::Nothing };
        }
        self.waited += passed.min(2 * pause(patience));
        let limit = patience.max(self.slowest * SLOWER_THAN_SEEN);
        if self.waited < limit {
            return StepFinding::Nothing;
        }
        let seconds = self.waited.as_secs();
        let found = if self.stalled.is_none() { StepFinding::Stalls } else { StepFinding::Nothing };
        self.stalled = Some(format!(
            "no step has ended for {seconds} s while {} sequences wait: the engine is {}",
            now.sequences, now.phase
        ));
        if self.waited < limit * HOPELESS { found } else { StepFinding::Hopeless }
    }
}

/// Between two looks.
pub(super) fn pause(patience: Duration) -> Duration {
    (patience / LOOKS).min(MAX_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_engine::EnginePhase;

    const PATIENCE: Duration = Duration::from_mins(1);

    fn progress(ended_steps: u64, has_work: bool) -> EngineProgress {
        let phase = EnginePhase::Collecting { sequences: 2 };
        EngineProgress { phase, ended_steps, sequences: 3, has_work }
    }

    /// Looks once a second for `seconds`, and returns the second of each finding.
    fn looks(watch: &mut StepWatch, seconds: u64, now: &EngineProgress) -> Vec<(u64, StepFinding)> {
        let look = |second| (second, watch.look(now, Duration::from_secs(1), PATIENCE));
        (1..=seconds).map(look).filter(|(_, found)| *found != StepFinding::Nothing).collect()
    }

    #[test]
    fn a_step_without_an_end_is_found_and_then_given_up() {
        let mut watch = StepWatch::default();
        assert_eq!(looks(&mut watch, 299, &progress(0, true)), [(60, StepFinding::Stalls)]);
        let why = watch.stalled.clone().unwrap();
        for part in ["299 s", "3 sequences wait", "collecting", "with 2 sequences"] {
            assert!(why.contains(part), "{part} is not in {why}");
        }
        assert_eq!(looks(&mut watch, 1, &progress(0, true)), [(1, StepFinding::Hopeless)]);
    }

    #[test]
    fn an_engine_that_goes_on_is_well_again_and_an_idle_one_never_stalls() {
        let mut watch = StepWatch::default();
        assert_eq!(looks(&mut watch, 60, &progress(0, true)), [(60, StepFinding::Stalls)]);
        assert_eq!(looks(&mut watch, 1, &progress(1, true)), [(1, StepFinding::GoesOn)]);
        assert_eq!(watch.stalled, None);
        assert_eq!(looks(&mut watch, 1_000, &progress(1, false)), []);
    }

    #[test]
    fn slow_steps_are_given_ten_times_as_long_as_the_slowest() {
        let mut watch = StepWatch::default();
        assert_eq!(looks(&mut watch, 20, &progress(0, true)), []);
        assert_eq!(looks(&mut watch, 200, &progress(1, true)), []);
        assert_eq!(looks(&mut watch, 1, &progress(1, true)), [(1, StepFinding::Stalls)]);
    }

    #[test]
    fn a_process_that_stood_still_has_not_stalled() {
        let mut watch = StepWatch::default();
        let day = Duration::from_hours(24);
        assert_eq!(watch.look(&progress(0, true), day, PATIENCE), StepFinding::Nothing);
        assert_eq!(looks(&mut watch, 57, &progress(0, true)), []);
    }
}

//! The CUDA graphs of a model: recorded parts of steps, by their number of rows.

use super::inputs::StepShape;
use crate::Result;
use cresset_kernels::gpu::{Gpu, Graph};
use std::collections::BTreeMap;

/// A part of a step that is launched at once. Between the two a step may wait for the masks of its
/// formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StepPart {
    /// From token ids to logits.
    Logits,
    /// From logits to the sampled tokens and their results.
    Sampling,
}

#[derive(Default)]
pub(super) struct Graphs {
    /// The numbers of rows of recorded steps, ascending.
    buckets: Vec<usize>,
    /// Those that are not recorded, or were dropped, are missing.
    recorded: BTreeMap<(usize, StepPart), Graph>,
}

impl Graphs {
    /// Makes buckets of powers of two and, from 16 on, the numbers halfway between them, up to
    /// `most` and `most` itself: at most half of a step is padding, beyond 16 rows a third, and
    /// start-up records few.
    pub(super) fn new(most: usize) -> Self {
        let powers = (0..usize::BITS - 1).map(|bit| 1 << bit);
        let steps =
            powers.flat_map(|rows: usize| [Some(rows), (rows >= 16).then_some(rows + rows / 2)]);
        let below = steps.flatten().take_while(|rows| *rows < most);
        let buckets = below.chain(Some(most).filter(|most| *most > 0)).collect();
        Self { buckets, recorded: BTreeMap::new() }
    }

    pub(super) fn buckets(&self) -> Vec<usize> {
        self.buckets.clone()
    }

    /// The smallest bucket with room for `rows` rows.
    pub(super) fn bucket(&self, rows: usize) -> Option<usize> {
        self.buckets.iter().copied().find(|bucket| *bucket >= rows.max(1))
    }

    /// Whether steps of this shape are recorded.
    pub(super) fn covers(&self, shape: &StepShape) -> bool {
        shape.is_decode() && self.bucket(shape.rows) == Some(shape.rows)
    }

    /// Records what `launch` launches.
    pub(super) fn record(
        &mut self,
        gpu: &dyn Gpu,
        (rows, part): (usize, StepPart),
        launch: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let mut outcome = Ok(());
        let graph = gpu.capture(&mut || {
            outcome = launch();
            Ok(())
        })?;
        outcome?;
        self.recorded.insert((rows, part), graph);
        Ok(())
    }

    /// Runs the recorded part of a step, and records it first if that was not done yet.
    pub(super) fn replay(
        &mut self,
        gpu: &dyn Gpu,
        key: (usize, StepPart),
        launch: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        if !self.recorded.contains_key(&key) {
            self.record(gpu, key, launch)?;
        }
        match self.recorded.get(&key) {
            Some(graph) => Ok(gpu.replay(graph)?),
            None => launch(),
        }
    }

    /// Drops all recordings, because buffers that they name have moved.
    pub(super) fn forget(&mut self) {
        self.recorded.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_all_rows_with_little_padding() {
        let check =
            |most, expect: &[usize]| assert_eq!(Graphs::new(most).buckets(), expect, "{most}");
        check(0, &[]);
        check(1, &[1]);
        check(6, &[1, 2, 4, 6]);
        check(200, &[1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 200]);
        check(512, &[1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]);
        let graphs = Graphs::new(200);
        let buckets = [0, 1, 3, 25, 193, 200, 201].map(|rows| graphs.bucket(rows));
        assert_eq!(buckets, [Some(1), Some(1), Some(4), Some(32), Some(200), Some(200), None]);
    }
}

//! The CUDA graphs of a model: recorded steps, by their number of rows.

use super::inputs::StepShape;
use crate::Result;
use cresset_kernels::gpu::{Gpu, Graph};
use std::collections::BTreeMap;

#[derive(Default)]
pub(super) struct Graphs {
    /// By number of rows; `None` stands for a graph that is not recorded, or was dropped.
    buckets: BTreeMap<usize, Option<Graph>>,
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
        let all = below.chain(Some(most).filter(|most| *most > 0));
        Self { buckets: all.map(|rows| (rows, None)).collect() }
    }

    pub(super) fn buckets(&self) -> Vec<usize> {
        self.buckets.keys().copied().collect()
    }

    /// The smallest bucket with room for `rows` rows.
    pub(super) fn bucket(&self, rows: usize) -> Option<usize> {
        self.buckets.keys().copied().find(|bucket| *bucket >= rows.max(1))
    }

    /// Whether steps of this shape are recorded.
    pub(super) fn covers(&self, shape: &StepShape) -> bool {
        shape.is_decode() && self.bucket(shape.rows) == Some(shape.rows)
    }

    /// Records what `step` launches.
    pub(super) fn record(
        &mut self,
        gpu: &dyn Gpu,
        shape: StepShape,
        step: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let mut outcome = Ok(());
        let graph = gpu.capture(&mut || {
            outcome = step();
            Ok(())
        })?;
        outcome?;
        if let Some(place) = self.buckets.get_mut(&shape.rows) {
            *place = Some(graph);
        }
        Ok(())
    }

    /// Runs the recorded step, and records it first if that was not done yet.
    pub(super) fn replay(
        &mut self,
        gpu: &dyn Gpu,
        shape: StepShape,
        step: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        if !matches!(self.buckets.get(&shape.rows), Some(Some(_))) {
            self.record(gpu, shape, step)?;
        }
        match self.buckets.get(&shape.rows) {
            Some(Some(graph)) => Ok(gpu.replay(graph)?),
            _ => step(),
        }
    }

    /// Drops all recordings, because buffers that they name have moved.
    pub(super) fn forget(&mut self) {
        self.buckets.values_mut().for_each(|graph| *graph = None);
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

//! A tile of queries on the CPU: what it reads, and the states of its online softmaxes.

use super::AttentionShape;
use crate::parts::Parts;
use crate::simd::LANES;
use std::ops::Range;

/// The position of the first key that a query at `position` sees.
pub(super) fn first_key(window: Option<usize>, position: usize) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

/// Rows (queries × heads of a group) that are kept in registers together; six were no faster.
pub(super) const ROWS: usize = 4;

/// The arguments of the op as slices.
pub(super) struct CpuArgs<'a, E> {
    pub q: &'a [f32],
    /// `[blocks, kv_heads, head_dim, block_size]`.
    pub k: &'a [E],
    /// `[blocks, kv_heads, block_size, head_dim]`; empty where values are parts of keys.
    pub v: &'a [E],
    /// `[heads]`
    pub sinks: Option<&'a [f32]>,
    pub shape: AttentionShape,
}

impl<E> CpuArgs<'_, E> {
    /// The keys that a query at `position` sees.
    pub(super) fn visible(&self, position: usize) -> Range<usize> {
        first_key(self.shape.window, position)..position + 1
    }

    /// The keys that at least one query of a tile sees.
    pub(super) fn seen(&self, tile: &QueryTile) -> Range<usize> {
        self.visible(tile.position).start..tile.position + tile.rows.len()
    }

    /// The offset at which the block of a position starts, which is the same in K and V, and the
    /// position within the block.
    pub(super) fn block(&self, blocks: &[u32], kv_head: usize, position: usize) -> (usize, usize) {
        let AttentionShape { kv_heads, head_dim, block_size, .. } = self.shape;
        let block = blocks[position / block_size] as usize;
        ((block * kv_heads + kv_head) * block_size * head_dim, position % block_size)
    }

    /// The length of a row of `RowStates::acc`.
    pub(super) fn padded_dim(&self) -> usize {
        self.shape.value_dim().next_multiple_of(LANES)
    }
}

/// Consecutive queries of one sequence.
pub(super) struct QueryTile<'a> {
    /// Its rows of `q` and `out`.
    pub rows: Range<usize>,
    /// Position of the first.
    pub position: usize,
    pub blocks: &'a [u32],
}

/// The states of online softmaxes, and their outputs before they are divided by the sums.
#[derive(Default)]
pub(super) struct RowStates {
    /// `[rows, padded_dim]`: sums of values times weights.
    pub acc: Vec<f32>,
    pub state: Vec<RowState>,
}

#[derive(Clone, Copy)]
pub(super) struct RowState {
    /// The largest score so far; weights are relative to it.
    pub max: f32,
    /// The sum of the weights.
    pub sum: f32,
}

impl RowState {
    /// The factor of the sums of values, and the sum of the weights, with that of a sink. It joins
    /// last, after all splits were merged.
    fn with_sink(self, sink: Option<f32>) -> (f32, f32) {
        let Some(sink) = sink else { return (1.0, self.sum) };
        let max = self.max.max(sink);
        let scale = (self.max - max).exp();
        (scale, self.sum * scale + (sink - max).exp())
    }
}

impl RowStates {
    pub(super) fn clear<E>(&mut self, p: &CpuArgs<E>, tile: &QueryTile) {
        let rows = tile.rows.len() * p.shape.group();
        self.acc.clear();
        self.acc.resize(rows * p.padded_dim(), 0.0);
        self.state.clear();
        self.state.resize(rows, RowState { max: f32::NEG_INFINITY, sum: 0.0 });
    }

    pub(super) fn finish<E>(&self, p: &CpuArgs<E>, tile: &QueryTile, kv_head: usize, out: &Parts) {
        let rows = self.acc.chunks_exact(p.padded_dim()).zip(&self.state);
        for (row, (acc, state)) in rows.enumerate() {
            let (query, head) = (
                tile.rows.start + row / p.shape.group(),
                kv_head * p.shape.group() + row % p.shape.group(),
            );
            let dim = p.shape.value_dim();
            let start = (query * p.shape.heads + head) * dim;
            // SAFETY: each (query, head) is finished once.
            let out = unsafe { out.slice(start..start + dim) };
            let (scale, sum) = state.with_sink(p.sinks.map(|sinks| sinks[head]));
            for (out, a) in out.iter_mut().zip(acc) {
                *out = a * scale / sum;
            }
        }
    }
}

//! Tiles of queries over splits of keys, each split a running softmax of its own (Milakov and
//! Gimelshein 2018; Dao et al. 2023, FlashAttention-2), the splits then merged in order.
//!
//! Splits and tiles of keys start at fixed positions and a query never meets a key beyond its
//! range, so neither chunking, nor neighbours, nor the block size, nor the threads can change a bit
//! of a result. A lone query's splits are tasks of their own: one sequence keeps all threads busy.
//!
//! Steps, predicted and measured (SmolLM2-135M, one token at 512, two threads; `RESULTS.md` has the
//! tables):
//! - K kept with its keys side by side and both caches read where they lie, in f16, instead of
//!   gathering 64 keys at a time and transposing them: 3.7 ms of 10.3 should become 0.5. Measured:
//!   about 1, 1.4 times as many tokens.
//! - Six rows through the registers instead of four: no difference; taken out again.
//! - Prefetching the next keys and the values: no difference; taken out again.

use super::QueryTile;
use super::tile::{Keys, TILE, attend_keys, gather};
use crate::Compute;
use crate::element::Element;
use crate::simd::{Isa, LANES, Lanes, vectorised};
use crate::storage::Parts;
use std::cell::RefCell;
use std::ops::Range;

/// Keys of a split: enough to pay for merging it.
const SPLIT: usize = 4 * TILE;
/// Rows (queries × heads of a group) that go through the registers together.
pub(super) const ROWS: usize = 4;

pub(super) struct Problem<'a, E> {
    pub q: &'a [f32],
    /// `[blocks, kv_heads, head_dim, block_size]`.
    pub k: &'a [E],
    /// `[blocks, kv_heads, block_size, head_dim]`.
    pub v: &'a [E],
    pub q_stride: usize,
    pub block_size: usize,
    /// Query heads per KV head.
    pub group: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    pub window: Option<usize>,
    pub softcap: Option<f32>,
}

impl<E> Problem<'_, E> {
    /// Keys that a query at `position` sees.
    pub fn visible(&self, position: usize) -> Range<usize> {
        let first = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
        first..position + 1
    }

    /// Keys that any query of a tile sees.
    fn seen(&self, tile: &QueryTile) -> Range<usize> {
        self.visible(tile.position).start..tile.position + tile.rows.len()
    }

    /// Where the block of a position starts, in K as in V, and the position in it.
    pub fn block(&self, blocks: &[u32], kv_head: usize, position: usize) -> (usize, usize) {
        let block = blocks[position / self.block_size] as usize;
        (
            (block * self.kv_heads + kv_head) * self.block_size * self.head_dim,
            position % self.block_size,
        )
    }

    fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }
}

/// Enough rows to pay for reading the keys.
pub(super) fn queries_per_tile(group: usize) -> usize {
    (32 / group).max(1)
}

/// All heads of a group for a tile of queries.
struct Task<'a> {
    tile: &'a QueryTile<'a>,
    kv_head: usize,
    splits: Range<usize>,
    /// Where the sums of its one split go, if others do the other splits.
    part: Option<usize>,
}

fn tasks<'a, E>(p: &Problem<E>, tiles: &'a [QueryTile]) -> Vec<Task<'a>> {
    let (mut tasks, mut parts) = (Vec::new(), 0..);
    // The last tiles of a prompt see the most keys: started first, they do not finish alone.
    for (tile, kv_head) in
        tiles.iter().rev().flat_map(|tile| (0..p.kv_heads).map(move |head| (tile, head)))
    {
        let seen = p.seen(tile);
        let splits = seen.start / SPLIT..seen.end.div_ceil(SPLIT);
        if tile.rows.len() == 1 && splits.len() > 1 {
            let split = |i| Task { tile, kv_head, splits: i..i + 1, part: parts.next() };
            tasks.extend(splits.map(split));
        } else {
            tasks.push(Task { tile, kv_head, splits, part: None });
        }
    }
    tasks
}

/// `out` is the whole output, every row of which is in one of the tiles.
pub(super) fn run<E: Element>(
    isa: Isa,
    c: &Compute,
    p: &Problem<E>,
    tiles: &[QueryTile],
    out: Parts,
) {
    let tasks = tasks(p, tiles);
    let count = tasks.iter().filter(|task| task.part.is_some()).count();
    PARTS.with_borrow_mut(|parts| {
        if parts.len() < count {
            parts.resize_with(count, Rows::default);
        }
        let shared = Parts::new(&mut parts[..]);
        c.run(tasks.len(), |i| {
            let Task { tile, kv_head, ref splits, part } = tasks[i];
            SCRATCH.with_borrow_mut(|Scratch { q, part: own, whole }| {
                pack(p, tile, kv_head, q);
                if let Some(part) = part {
                    // SAFETY: each part belongs to one task.
                    let part = unsafe { &mut shared.slice(part..part + 1)[0] };
                    return sum_split(isa, p, tile, kv_head, splits.start, q, part);
                }
                whole.clear(p, tile);
                for split in splits.clone() {
                    sum_split(isa, p, tile, kv_head, split, q, own);
                    merge(isa, whole, own);
                }
                whole.finish(p, tile, kv_head, out);
            });
        });
        let whole = |task: &Task| (task.tile.rows.start, task.kv_head);
        let split = tasks.iter().filter(|task| task.part.is_some()).zip(parts).collect::<Vec<_>>();
        for of_one in split.chunk_by(|a, b| whole(a.0) == whole(b.0)) {
            let Task { tile, kv_head, .. } = *of_one[0].0;
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.whole.clear(p, tile);
                for (_, part) in of_one {
                    merge(isa, &mut scratch.whole, part);
                }
                scratch.whole.finish(p, tile, kv_head, out);
            });
        }
    });
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    /// Of the thread that calls.
    static PARTS: RefCell<Vec<Rows>> = RefCell::default();
}

/// Buffers of one worker, reused from call to call.
#[derive(Default)]
struct Scratch {
    /// Queries in chunks of up to `ROWS`: `[head_dim, rows]` each.
    q: Vec<f32>,
    part: Rows,
    whole: Rows,
}

fn pack<E>(p: &Problem<E>, tile: &QueryTile, kv_head: usize, q: &mut Vec<f32>) {
    q.resize(tile.rows.len() * p.group * p.head_dim, 0.0);
    for (chunk, packed) in q.chunks_mut(ROWS * p.head_dim).enumerate() {
        let rows = packed.len() / p.head_dim;
        for r in 0..rows {
            let row = chunk * ROWS + r;
            let start = (tile.rows.start + row / p.group) * p.q_stride
                + (kv_head * p.group + row % p.group) * p.head_dim;
            for (d, q) in p.q[start..start + p.head_dim].iter().enumerate() {
                packed[d * rows + r] = *q;
            }
        }
    }
}

/// Softmaxes in progress.
#[derive(Default)]
pub(super) struct Rows {
    /// `[rows, padded head_dim]`: values times weights.
    pub acc: Vec<f32>,
    pub state: Vec<RowState>,
}

#[derive(Clone, Copy)]
pub(super) struct RowState {
    /// The largest score; weights are relative to it.
    pub largest: f32,
    /// The sum of the weights.
    pub total: f32,
}

impl Rows {
    fn clear<E>(&mut self, p: &Problem<E>, tile: &QueryTile) {
        let rows = tile.rows.len() * p.group;
        self.acc.clear();
        self.acc.resize(rows * p.padded_dim(), 0.0);
        self.state.clear();
        self.state.resize(rows, RowState { largest: f32::NEG_INFINITY, total: 0.0 });
    }

    fn finish<E>(&self, p: &Problem<E>, tile: &QueryTile, kv_head: usize, out: Parts) {
        let rows = self.acc.chunks_exact(p.padded_dim()).zip(&self.state);
        for (row, (acc, state)) in rows.enumerate() {
            let (query, head) =
                (tile.rows.start + row / p.group, kv_head * p.group + row % p.group);
            let start = (query * p.kv_heads * p.group + head) * p.head_dim;
            // SAFETY: each (query, head) is finished once.
            let out = unsafe { out.slice(start..start + p.head_dim) };
            for (out, a) in out.iter_mut().zip(acc) {
                *out = a / state.total;
            }
        }
    }
}

vectorised! {
    /// Sets `rows` to the tile's softmaxes over one split.
    fn sum_split<E: Element>(
        p: &Problem<E>,
        tile: &QueryTile,
        kv_head: usize,
        split: usize,
        q: &[f32],
        rows: &mut Rows,
    ) = sum_keys
}

#[inline(always)]
fn sum_keys<L: Lanes, E: Element>(
    p: &Problem<E>,
    tile: &QueryTile,
    kv_head: usize,
    split: usize,
    q: &[f32],
    rows: &mut Rows,
) {
    rows.clear(p, tile);
    let seen = p.seen(tile);
    let (first, last) =
        ((seen.start / TILE * TILE).max(split * SPLIT), seen.end.min((split + 1) * SPLIT));
    for start in (first..last).step_by(TILE) {
        let positions = start..last.min(start + TILE);
        let (copied, copy);
        let (p, keys) = if p.block_size.is_multiple_of(LANES) {
            (p, Keys::new(p, tile.blocks, kv_head, positions))
        } else {
            copied = gather(p, tile.blocks, kv_head, positions.clone());
            copy = Problem { k: &copied[0], v: &copied[1], block_size: TILE, kv_heads: 1, ..*p };
            // Whatever the position, it is in block 0.
            (&copy, Keys::new(&copy, &vec![0; last.div_ceil(TILE)], 0, positions))
        };
        attend_keys::<L, E>(p, tile, &keys, q, rows);
    }
}

vectorised! {
    fn merge(whole: &mut Rows, part: &Rows) = merge_rows
}

#[inline(always)]
fn merge_rows<L: Lanes>(whole: &mut Rows, part: &Rows) {
    let width = part.acc.len() / part.state.len();
    let sums = whole.acc.chunks_exact_mut(width).zip(part.acc.chunks_exact(width));
    for ((sums, more), (state, other)) in sums.zip(whole.state.iter_mut().zip(&part.state)) {
        // A row that sees no key of this split.
        if other.total == 0.0 {
            continue;
        }
        let largest = if other.largest > state.largest { other.largest } else { state.largest };
        let old = L::splat(state.largest - largest).exp().to_array()[0];
        let new = L::splat(other.largest - largest).exp().to_array()[0];
        for (sum, more) in sums.as_chunks_mut().0.iter_mut().zip(more.as_chunks().0) {
            L::load(more).mul_add(L::splat(new), L::load(sum).mul(L::splat(old))).store(sum);
        }
        *state = RowState { largest, total: state.total * old + other.total * new };
    }
}

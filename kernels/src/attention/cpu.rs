//! Tiles of queries against tiles of 64 keys with a running softmax (Milakov and Gimelshein 2018; Dao 2023, FlashAttention-2).
//!
//! A tile of keys is gathered once from the pages, K transposed so that lanes are keys, V as it is. Both products then
//! run over contiguous scratch, each result a chain of its own: over dimensions for a score, over keys for an output. Key
//! tiles start at multiples of 64 and a query never meets a key beyond its range, so neither chunking, nor neighbours, nor
//! the block size can change a bit of a result.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::QueryTile;
use crate::simd::{Isa, LANES, Lanes, vectorised};
use crate::storage::Parts;
use std::cell::RefCell;
use std::ops::Range;

const TILE: usize = 64;
/// Rows (queries × heads of a group) that go through the registers together.
const ROWS: usize = 4;
const VECTORS: usize = TILE / LANES;

pub(super) struct Problem<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
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

impl Problem<'_> {
    /// Keys that a query at `position` sees.
    fn visible(&self, position: usize) -> Range<usize> {
        let first = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
        first..position + 1
    }

    /// Where a token's K and V of one head start in the caches.
    fn token(&self, blocks: &[u32], position: usize, kv_head: usize) -> usize {
        let slot = blocks[position / self.block_size] as usize * self.block_size + position % self.block_size;
        (slot * self.kv_heads + kv_head) * self.head_dim
    }

    fn padded_dim(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }
}

/// Enough rows to pay for gathering the keys.
pub(super) fn queries_per_tile(group: usize) -> usize {
    (32 / group).max(1)
}

/// Buffers of one worker, reused from call to call.
#[derive(Default)]
struct Scratch {
    /// Queries in chunks of up to `ROWS`: `[head_dim, rows]` each.
    q: Vec<f32>,
    /// `[padded head_dim, TILE]`.
    k: Vec<f32>,
    /// `[TILE, padded head_dim]`.
    v: Vec<f32>,
    /// `[rows, padded head_dim]`.
    acc: Vec<f32>,
    state: Vec<RowState>,
}

/// The running softmax of a row.
#[derive(Clone, Copy)]
struct RowState {
    largest: f32,
    total: f32,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// All heads of a group for a tile of queries; `out` is the whole output, of which the tile owns its rows' group columns.
pub(super) fn tile(isa: Isa, p: &Problem, tile: &QueryTile, kv_head: usize, out: Parts) {
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.start(p, tile, kv_head);
        attend(isa, p, tile, kv_head, scratch);
        scratch.finish(p, tile, kv_head, out);
    });
}

vectorised! {
    fn attend(p: &Problem, tile: &QueryTile, kv_head: usize, scratch: &mut Scratch) = attend_tiles
}

#[inline(always)]
fn attend_tiles<L: Lanes>(p: &Problem, tile: &QueryTile, kv_head: usize, scratch: &mut Scratch) {
    let last = tile.position + tile.rows.len();
    let first = p.visible(tile.position).start / TILE * TILE;
    for start in (first..last).step_by(TILE) {
        let keys = start..last.min(start + TILE);
        gather_keys::<L>(p, tile.blocks, kv_head, keys.clone(), &mut scratch.k);
        gather_values(p, tile.blocks, kv_head, keys, &mut scratch.v);
        attend_keys::<L>(p, tile, start, scratch);
    }
}

impl Scratch {
    fn start(&mut self, p: &Problem, tile: &QueryTile, kv_head: usize) {
        let rows = tile.rows.len() * p.group;
        self.q.resize(rows * p.head_dim, 0.0);
        self.k.resize(p.padded_dim() * TILE, 0.0);
        self.v.resize(p.padded_dim() * TILE, 0.0);
        self.acc.clear();
        self.acc.resize(rows * p.padded_dim(), 0.0);
        self.state.clear();
        let empty = RowState { largest: f32::NEG_INFINITY, total: 0.0 };
        self.state.resize(rows, empty);
        for (chunk, packed) in self.q.chunks_mut(ROWS * p.head_dim).enumerate() {
            let rows = packed.len() / p.head_dim;
            for r in 0..rows {
                let row = chunk * ROWS + r;
                let start =
                    (tile.rows.start + row / p.group) * p.q_stride + (kv_head * p.group + row % p.group) * p.head_dim;
                for (d, q) in p.q[start..start + p.head_dim].iter().enumerate() {
                    packed[d * rows + r] = *q;
                }
            }
        }
    }

    fn finish(&self, p: &Problem, tile: &QueryTile, kv_head: usize, out: Parts) {
        let rows = self.acc.chunks_exact(p.padded_dim()).zip(&self.state);
        for (row, (acc, state)) in rows.enumerate() {
            let (query, head) = (tile.rows.start + row / p.group, kv_head * p.group + row % p.group);
            let start = (query * p.kv_heads * p.group + head) * p.head_dim;
            // SAFETY: each (query, head) belongs to one task.
            let out = unsafe { out.slice(start..start + p.head_dim) };
            for (out, a) in out.iter_mut().zip(acc) {
                *out = a / state.total;
            }
        }
    }
}

/// K of `keys` into `[padded head_dim, TILE]`; the columns of keys that do not exist are zero.
#[inline(always)]
fn gather_keys<L: Lanes>(p: &Problem, blocks: &[u32], kv_head: usize, keys: Range<usize>, out: &mut [f32]) {
    for column in (0..TILE).step_by(LANES) {
        let starts: [Option<usize>; LANES] = std::array::from_fn(|i| {
            let position = keys.start + column + i;
            (position < keys.end).then(|| p.token(blocks, position, kv_head))
        });
        for d in (0..p.head_dim).step_by(LANES) {
            let width = LANES.min(p.head_dim - d);
            let mut square = [L::splat(0.0); LANES];
            for (row, start) in square.iter_mut().zip(starts) {
                if let Some(start) = start {
                    *row = load_some(&p.k[start + d..start + d + width]);
                }
            }
            L::transpose(&mut square);
            for (i, column_of) in square.into_iter().enumerate() {
                let to = (d + i) * TILE + column;
                column_of.store(lanes_mut(&mut out[to..to + LANES]));
            }
        }
    }
}

/// V of `keys` into `[TILE, padded head_dim]`.
#[inline(always)]
fn gather_values(p: &Problem, blocks: &[u32], kv_head: usize, keys: Range<usize>, out: &mut [f32]) {
    for (position, row) in keys.zip(out.chunks_exact_mut(p.padded_dim())) {
        let start = p.token(blocks, position, kv_head);
        row[..p.head_dim].copy_from_slice(&p.v[start..start + p.head_dim]);
    }
}

/// Brings every row of the tile forward over the gathered keys, which start at position `start`.
#[inline(always)]
fn attend_keys<L: Lanes>(p: &Problem, tile: &QueryTile, start: usize, scratch: &mut Scratch) {
    let Scratch { q, k, v, acc, state } = scratch;
    let chunks = q.chunks(ROWS * p.head_dim).zip(acc.chunks_mut(ROWS * p.padded_dim()));
    for (chunk, ((q, acc), state)) in chunks.zip(state.chunks_mut(ROWS)).enumerate() {
        let row = chunk * ROWS;
        match state.len() {
            1 => attend_rows::<L, 1>(p, tile, row, start, q, k, v, acc, state),
            2 => attend_rows::<L, 2>(p, tile, row, start, q, k, v, acc, state),
            3 => attend_rows::<L, 3>(p, tile, row, start, q, k, v, acc, state),
            _ => attend_rows::<L, ROWS>(p, tile, row, start, q, k, v, acc, state),
        }
    }
}

/// `R` rows, the first of which is `row` of the tile.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the pieces of one scratch, split so that they borrow apart")]
fn attend_rows<L: Lanes, const R: usize>(
    p: &Problem,
    tile: &QueryTile,
    row: usize,
    start: usize,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    acc: &mut [f32],
    state: &mut [RowState],
) {
    let mut keys: [Range<usize>; R] = std::array::from_fn(|_| 0..0);
    for (r, keys) in keys.iter_mut().enumerate() {
        let seen = p.visible(tile.position + (row + r) / p.group);
        *keys = seen.start.saturating_sub(start).min(TILE)..seen.end.saturating_sub(start).min(TILE);
    }
    if keys.iter().all(Range::is_empty) {
        return;
    }
    let mut weights = scores::<L, R>(q, &k[..p.head_dim * TILE]);
    let width = p.padded_dim();
    for (r, keys) in keys.iter().enumerate().filter(|(_, keys)| !keys.is_empty()) {
        let old = soften::<L>(p, &mut weights[r], keys.clone(), &mut state[r]);
        crate::simd::map::<L>(&mut acc[r * width..(r + 1) * width], 0.0, |a| a.mul(L::splat(old)));
    }
    let common = keys.iter().fold(0..TILE, |a, b| a.start.max(b.start)..a.end.min(b.end));
    if common.is_empty() {
        for (r, keys) in keys.into_iter().enumerate() {
            accumulate::<L, 1>([&weights[r]], keys, v, &mut acc[r * width..(r + 1) * width]);
        }
        return;
    }
    for (r, keys) in keys.iter().enumerate() {
        accumulate::<L, 1>([&weights[r]], keys.start..common.start, v, &mut acc[r * width..(r + 1) * width]);
    }
    accumulate::<L, R>(weights.each_ref(), common.clone(), v, acc);
    for (r, keys) in keys.iter().enumerate() {
        accumulate::<L, 1>([&weights[r]], common.end..keys.end, v, &mut acc[r * width..(r + 1) * width]);
    }
}

/// `Q·Kᵀ` of `R` rows and a tile: `q: [head_dim, R]`, `k: [head_dim, TILE]`.
#[inline(always)]
fn scores<L: Lanes, const R: usize>(q: &[f32], k: &[f32]) -> [[f32; TILE]; R] {
    let mut sums = [[L::splat(0.0); VECTORS]; R];
    let (q, _) = q.as_chunks::<R>();
    let (k, _) = k.as_chunks::<TILE>();
    for (q, k) in q.iter().zip(k) {
        let (vectors, _) = k.as_chunks::<LANES>();
        for i in 0..VECTORS {
            let key = L::load(&vectors[i]);
            for r in 0..R {
                sums[r][i] = key.mul_add(L::splat(q[r]), sums[r][i]);
            }
        }
    }
    let mut out = [[0.0; TILE]; R];
    for (out, sums) in out.iter_mut().zip(sums) {
        for (out, sum) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(sums) {
            sum.store(out);
        }
    }
    out
}

/// Scores to weights relative to the row's largest score so far; returns the factor that brings older sums to it.
#[inline(always)]
fn soften<L: Lanes>(p: &Problem, scores: &mut [f32; TILE], keys: Range<usize>, state: &mut RowState) -> f32 {
    crate::simd::map::<L>(scores, 0.0, |s| s.mul(L::splat(p.scale)));
    if let Some(cap) = p.softcap {
        crate::simd::map::<L>(scores, 0.0, |s| soft_cap(s, cap));
    }
    scores[..keys.start].fill(f32::NEG_INFINITY);
    scores[keys.end..].fill(f32::NEG_INFINITY);
    let (vectors, _) = scores.as_chunks_mut::<LANES>();
    let mut largest = L::splat(state.largest);
    for v in &*vectors {
        largest = largest.max(L::load(v));
    }
    let largest = largest.largest();
    let mut total = L::splat(0.0);
    for v in vectors {
        let weight = L::load(v).add(L::splat(-largest)).exp();
        total = total.add(weight);
        weight.store(v);
    }
    let old = L::splat(state.largest - largest).exp().to_array()[0];
    *state = RowState { largest, total: state.total * old + total.sum() };
    old
}

/// `cap · tanh(s / cap)` as `cap - 2·cap / (e^(2s/cap) + 1)`.
#[inline(always)]
fn soft_cap<L: Lanes>(s: L, cap: f32) -> L {
    let grown = s.mul(L::splat(2.0 / cap)).exp().add(L::splat(1.0));
    L::splat(-2.0 * cap).div(grown).add(L::splat(cap))
}

/// `acc[r] += Σ weights[r][key] · v[key]` over `keys`, key by key.
#[inline(always)]
fn accumulate<L: Lanes, const R: usize>(weights: [&[f32; TILE]; R], keys: Range<usize>, v: &[f32], acc: &mut [f32]) {
    let width = acc.len() / R;
    let mut column = 0;
    while column + 4 * LANES <= width {
        accumulate_columns::<L, R, 4>(weights, keys.clone(), v, acc, column);
        column += 4 * LANES;
    }
    while column < width {
        accumulate_columns::<L, R, 1>(weights, keys.clone(), v, acc, column);
        column += LANES;
    }
}

/// `W` vectors of columns from `column` on.
#[inline(always)]
fn accumulate_columns<L: Lanes, const R: usize, const W: usize>(
    weights: [&[f32; TILE]; R],
    keys: Range<usize>,
    v: &[f32],
    acc: &mut [f32],
    column: usize,
) {
    let width = acc.len() / R;
    let at = |r: usize, w: usize| r * width + column + w * LANES;
    let mut sums = [[L::splat(0.0); W]; R];
    for r in 0..R {
        for w in 0..W {
            sums[r][w] = L::load(lanes(&acc[at(r, w)..at(r, w) + LANES]));
        }
    }
    for (key, v) in v.chunks_exact(width).enumerate().take(keys.end).skip(keys.start) {
        let (vectors, _) = v[column..column + W * LANES].as_chunks::<LANES>();
        for w in 0..W {
            let value = L::load(&vectors[w]);
            for r in 0..R {
                sums[r][w] = value.mul_add(L::splat(weights[r][key]), sums[r][w]);
            }
        }
    }
    for r in 0..R {
        for w in 0..W {
            sums[r][w].store(lanes_mut(&mut acc[at(r, w)..at(r, w) + LANES]));
        }
    }
}

#[inline(always)]
fn lanes(data: &[f32]) -> &[f32; LANES] {
    data.first_chunk().expect("invariant: a full vector")
}

#[inline(always)]
fn lanes_mut(data: &mut [f32]) -> &mut [f32; LANES] {
    data.first_chunk_mut().expect("invariant: a full vector")
}

/// Up to a full vector, the missing lanes zero.
#[inline(always)]
fn load_some<L: Lanes>(data: &[f32]) -> L {
    if let Some(full) = data.first_chunk() {
        return L::load(full);
    }
    let mut padded = [0.0; LANES];
    padded[..data.len()].copy_from_slice(data);
    L::load(&padded)
}

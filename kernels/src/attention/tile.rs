//! Multiplies a tile of queries with a tile of 64 keys, and the weights with the values, both read
//! in place. A vector's lanes are keys for scores, and dimensions for outputs. Each result is
//! summed in a chain of its own: over dimensions for a score, over keys for an output.
#![expect(
    clippy::needless_range_loop,
    reason = "the indices of register tiles are those of rows and vectors"
)]

use super::AttentionShape;
use super::query_tile::{CpuArgs, QueryTile, ROWS, RowState, RowStates};
use crate::element::{Element, load_some};
use crate::simd::{LANES, Lanes, soft_cap};
use std::ops::Range;

pub(super) const TILE: usize = 64;
const VECTORS: usize = TILE / LANES;

/// The places of a tile's keys in the cache, in groups of sixteen neighbours.
pub(super) struct KeyTile {
    /// Position of the first key.
    start: usize,
    groups: usize,
    /// The offset of each group in `k` and `v`.
    k: [usize; VECTORS],
    v: [usize; VECTORS],
}

impl KeyTile {
    /// The cache's blocks must hold whole groups. Groups before the one of `seen`, the first key
    /// that any query sees, may have no block; that group takes their place.
    pub(super) fn new<E>(
        p: &CpuArgs<E>,
        blocks: &[u32],
        kv_head: usize,
        positions: Range<usize>,
        seen: usize,
    ) -> Self {
        let groups = positions.len().div_ceil(LANES);
        let mut keys = Self { start: positions.start, groups, k: [0; VECTORS], v: [0; VECTORS] };
        for (group, position) in positions.step_by(LANES).enumerate() {
            let position = position.max(seen / LANES * LANES);
            let (start, offset) = p.block(blocks, kv_head, position);
            keys.k[group] = start + offset;
            keys.v[group] = start + offset * p.shape.value_dim();
        }
        keys
    }

    /// Copies values that are the first `width` dimensions of the keys, token by token, and points
    /// to the copy.
    pub(super) fn copy_values<E: Element>(&mut self, p: &CpuArgs<E>, width: usize) -> Vec<E> {
        let mut values = vec![E::default(); self.groups * LANES * width];
        for (group, values) in values.chunks_exact_mut(LANES * width).enumerate() {
            self.v[group] = group * LANES * width;
            for d in 0..width {
                let keys = &p.k[self.k[group] + d * p.shape.block_size..][..LANES];
                for (value, key) in values[d..].iter_mut().step_by(width).zip(keys) {
                    *value = *key;
                }
            }
        }
        values
    }
}

/// Copies a tile's keys and values into one block of `TILE` keys, for caches whose blocks do not
/// hold whole groups. Keys before `seen` may have no block; that key takes their place.
pub(super) fn gather<E: Element>(
    p: &CpuArgs<E>,
    blocks: &[u32],
    kv_head: usize,
    positions: Range<usize>,
    seen: usize,
) -> [Vec<E>; 2] {
    let AttentionShape { head_dim, block_size, value_prefix, .. } = p.shape;
    let width = p.shape.value_dim();
    let mut out = [head_dim, width].map(|dim| vec![E::default(); dim * TILE]);
    for (i, position) in positions.enumerate() {
        let (start, offset) = p.block(blocks, kv_head, position.max(seen));
        for d in 0..head_dim {
            out[0][d * TILE + i] = p.k[start + d * block_size + offset];
        }
        for d in 0..width {
            out[1][i * width + d] = match value_prefix {
                Some(_) => p.k[start + d * block_size + offset],
                None => p.v[start + offset * width + d],
            };
        }
    }
    out
}

/// Adds the keys to the state of every row of the tile.
#[inline(always)]
pub(super) fn attend_keys<L: Lanes, E: Element>(
    p: &CpuArgs<E>,
    tile: &QueryTile,
    keys: &KeyTile,
    q: &[f32],
    rows: &mut RowStates,
) {
    let width = rows.acc.len() / rows.state.len();
    let chunks = q.chunks(ROWS * p.shape.head_dim).zip(rows.acc.chunks_mut(ROWS * width));
    for (chunk, ((q, acc), state)) in chunks.zip(rows.state.chunks_mut(ROWS)).enumerate() {
        let row = chunk * ROWS;
        match state.len() {
            1 => attend_rows::<L, E, 1>(p, tile, row, keys, q, acc, state),
            2 => attend_rows::<L, E, 2>(p, tile, row, keys, q, acc, state),
            3 => attend_rows::<L, E, 3>(p, tile, row, keys, q, acc, state),
            _ => attend_rows::<L, E, ROWS>(p, tile, row, keys, q, acc, state),
        }
    }
}

/// Adds the keys to the state of `R` rows, the first of which is `row` of the tile.
#[inline(always)]
fn attend_rows<L: Lanes, E: Element, const R: usize>(
    p: &CpuArgs<E>,
    tile: &QueryTile,
    row: usize,
    keys: &KeyTile,
    q: &[f32],
    acc: &mut [f32],
    state: &mut [RowState],
) {
    let mut seen: [Range<usize>; R] = std::array::from_fn(|_| 0..0);
    for (r, seen) in seen.iter_mut().enumerate() {
        let all = p.visible(tile.position + (row + r) / p.shape.group());
        *seen = all.start.saturating_sub(keys.start).min(TILE)
            ..all.end.saturating_sub(keys.start).min(TILE);
    }
    if seen.iter().all(Range::is_empty) {
        return;
    }
    let mut weights = scores::<L, E, R>(p, keys, q);
    let width = acc.len() / R;
    for (r, seen) in seen.iter().enumerate().filter(|(_, seen)| !seen.is_empty()) {
        let old = online_softmax::<L, E>(p, &mut weights[r], seen.clone(), &mut state[r]);
        for a in acc[r * width..(r + 1) * width].as_chunks_mut().0 {
            L::load(a).mul(L::splat(old)).store(a);
        }
    }
    let mut common = seen.iter().fold(0..TILE, |a, b| a.start.max(b.start)..a.end.min(b.end));
    if common.is_empty() {
        common = TILE..TILE;
    }
    for after in [false, true] {
        for (r, seen) in seen.iter().enumerate() {
            let own =
                if after { common.end..seen.end } else { seen.start..seen.end.min(common.start) };
            accumulate::<L, E, 1>(
                p,
                [&weights[r]],
                keys,
                own,
                &mut acc[r * width..(r + 1) * width],
            );
        }
        if !after {
            accumulate::<L, E, R>(p, weights.each_ref(), keys, common.clone(), acc);
        }
    }
}

/// `Q·Kᵀ` of `R` rows and a tile: `q: [head_dim, R]`. Scores beyond the last key have no meaning.
#[inline(always)]
fn scores<L: Lanes, E: Element, const R: usize>(
    p: &CpuArgs<E>,
    keys: &KeyTile,
    q: &[f32],
) -> [[f32; TILE]; R] {
    let mut out = [[0.0; TILE]; R];
    if keys.groups == VECTORS {
        score_groups::<L, E, R, VECTORS>(p, keys, 0, q, &mut out);
    } else {
        for group in 0..keys.groups {
            score_groups::<L, E, R, 1>(p, keys, group, q, &mut out);
        }
    }
    out
}

/// The scores of `W` groups of keys from `first` on.
#[inline(always)]
fn score_groups<L: Lanes, E: Element, const R: usize, const W: usize>(
    p: &CpuArgs<E>,
    keys: &KeyTile,
    first: usize,
    q: &[f32],
    out: &mut [[f32; TILE]; R],
) {
    let mut columns = [std::ptr::null::<E>(); W];
    for w in 0..W {
        let start = keys.k[first + w];
        columns[w] =
            p.k[start..start + (p.shape.head_dim - 1) * p.shape.block_size + LANES].as_ptr();
    }
    let mut sums = [[L::splat(0.0); W]; R];
    for (d, q) in q.as_chunks::<R>().0.iter().enumerate().take(p.shape.head_dim) {
        for w in 0..W {
            // SAFETY: the slice above ends with the last dimension's vector.
            let key: L = E::load(unsafe { &*columns[w].add(d * p.shape.block_size).cast() });
            for r in 0..R {
                sums[r][w] = key.mul_add(L::splat(q[r]), sums[r][w]);
            }
        }
    }
    for r in 0..R {
        for w in 0..W {
            sums[r][w].store(&mut out[r].as_chunks_mut().0[first + w]);
        }
    }
}

/// Turns scores into weights relative to the row's largest score so far, and returns the factor by
/// which older sums must be multiplied.
#[inline(always)]
fn online_softmax<L: Lanes, E>(
    p: &CpuArgs<E>,
    scores: &mut [f32; TILE],
    keys: Range<usize>,
    state: &mut RowState,
) -> f32 {
    for v in scores.as_chunks_mut().0 {
        let s = L::load(v).mul(L::splat(p.shape.scale));
        if let Some(cap) = p.shape.softcap { soft_cap(s, cap) } else { s }.store(v);
    }
    scores[..keys.start].fill(f32::NEG_INFINITY);
    scores[keys.end..].fill(f32::NEG_INFINITY);
    let (vectors, _) = scores.as_chunks_mut::<LANES>();
    let mut largest = L::splat(state.max);
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
    let old = L::splat(state.max - largest).exp().to_array()[0];
    *state = RowState { max: largest, sum: state.sum * old + total.sum() };
    old
}

/// `acc[r] += Σ weights[r][key] · v[key]` over `seen` of the tile's keys, key by key.
#[inline(always)]
fn accumulate<L: Lanes, E: Element, const R: usize>(
    p: &CpuArgs<E>,
    weights: [&[f32; TILE]; R],
    keys: &KeyTile,
    seen: Range<usize>,
    acc: &mut [f32],
) {
    let (mut column, dim) = (0, p.shape.value_dim());
    while column + VECTORS * LANES <= dim {
        accumulate_columns::<L, E, R, VECTORS>(p, weights, keys, seen.clone(), acc, column);
        column += VECTORS * LANES;
    }
    while column < dim {
        accumulate_columns::<L, E, R, 1>(p, weights, keys, seen.clone(), acc, column);
        column += LANES;
    }
}

/// Adds `W` vectors of columns from `column` on.
#[inline(always)]
fn accumulate_columns<L: Lanes, E: Element, const R: usize, const W: usize>(
    p: &CpuArgs<E>,
    weights: [&[f32; TILE]; R],
    keys: &KeyTile,
    seen: Range<usize>,
    acc: &mut [f32],
    column: usize,
) {
    let (width, dim) = (acc.len() / R, p.shape.value_dim());
    let columns = column..dim.min(column + W * LANES);
    let mut sums = [[L::splat(0.0); W]; R];
    for r in 0..R {
        for w in 0..W {
            sums[r][w] = L::load(&acc[r * width + column..].as_chunks().0[w]);
        }
    }
    let mut key = seen.start;
    while key < seen.end {
        let group = key / LANES;
        let end = seen.end.min((group + 1) * LANES);
        let start = keys.v[group] + key % LANES * dim;
        for v in p.v[start..start + (end - key) * dim].chunks_exact(dim) {
            let v = &v[columns.clone()];
            for w in 0..W {
                // Only the last vector of a row may have fewer lanes, and it is added alone.
                let value =
                    if W == 1 { load_some::<L, E>(v) } else { E::load(&v.as_chunks().0[w]) };
                for r in 0..R {
                    sums[r][w] = value.mul_add(L::splat(weights[r][key]), sums[r][w]);
                }
            }
            key += 1;
        }
    }
    for r in 0..R {
        for w in 0..W {
            sums[r][w].store(&mut acc[r * width + column..].as_chunks_mut().0[w]);
        }
    }
}

//! The product. Panels are shared out among the threads in pairs. Few token rows are multiplied while weights are decoded
//! (`fused`); for many, a thread decodes a chunk of its panels into cache and runs the micro-kernel (`tile`) over all of them.

use super::decode::{Columns, with_codec};
use super::format::BLOCK;
use super::fused::{self, Direct};
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{LANES, Lanes, Portable};
use super::pack::{self, Line};
use super::tile::{self, Operands, PANELS, ROWS, Sums};
use super::{Part, Weight};
use crate::Compute;
use crate::simd::Isa;
use crate::storage::Parts;
use candle_core::quantized::GgmlDType;
use std::cell::RefCell;
use std::ops::Range;

/// Up to this many token rows are multiplied directly.
const FEW_ROWS: usize = 8;
/// Columns decoded at a time for more.
const CHUNK: usize = 512;

thread_local! {
    /// Decoded panels of this thread: `[PANELS][chunk][16]` f32.
    static PANEL_SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    /// Token rows in tile order, of the thread that calls.
    static TILE_SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

struct Job<'a> {
    weight: &'a Weight,
    bias: Option<&'a [f32]>,
    /// Few rows: `[n][padded cols]`. Many: tiles one after another, each `[padded cols][tile rows]`.
    x: &'a [f32],
    n: usize,
    out: Parts<'a>,
}

/// `out[n, rows] = x[n, cols] · Wᵀ (+ bias)`; sizes have been checked.
pub(super) fn run(isa: Isa, c: &Compute, weight: &Weight, bias: Option<&[f32]>, x: &[f32], out: &mut [f32]) {
    let n = x.len() / weight.cols;
    TILE_SCRATCH.with_borrow_mut(|scratch| {
        let x = lay_out(c, x, n, weight.cols, scratch);
        let out = Parts::new(out);
        let job = Job { weight, bias, x, n, out };
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => job.run::<Avx512>(c),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => job.run::<Avx2>(c),
            Isa::Portable => job.run::<Portable>(c),
        }
    });
}

/// Rows of the tile that starts at `row`: 12, or the smallest tile that holds what is left (padded with zeros).
fn tile_rows(row: usize, n: usize) -> usize {
    match n - row {
        1 => 1,
        2 => 2,
        3 | 4 => 4,
        5..=8 => 8,
        _ => ROWS,
    }
}

/// `x` as `Job::x` wants it. Few rows without padding are that already.
fn lay_out<'a>(c: &Compute, x: &'a [f32], n: usize, cols: usize, scratch: &'a mut Vec<f32>) -> &'a [f32] {
    let padded = cols.next_multiple_of(BLOCK);
    if n <= FEW_ROWS && padded == cols {
        return x;
    }
    let size = n.next_multiple_of(ROWS) * padded;
    if scratch.len() < size {
        scratch.resize(size, 0.0);
    }
    if n <= FEW_ROWS {
        for (to, from) in scratch.chunks_exact_mut(padded).zip(x.chunks_exact(cols)) {
            to[..cols].copy_from_slice(from);
            to[cols..].fill(0.0);
        }
        return &scratch[..size];
    }
    let tiles = Parts::new(&mut scratch[..size]);
    c.run(n.div_ceil(ROWS), |i| {
        let first = i * ROWS;
        let rows = tile_rows(first, n);
        // SAFETY: tiles are disjoint.
        let tile = unsafe { tiles.slice(first * padded..(first + rows) * padded) };
        transpose(&x[first * cols..n.min(first + rows) * cols], cols, rows, tile);
    });
    &scratch[..size]
}

/// `[rows.len() / cols][cols]` to `[padded cols][height]`, padded with zeros both ways.
fn transpose(rows: &[f32], cols: usize, height: usize, tile: &mut [f32]) {
    tile.fill(0.0);
    for (r, row) in rows.chunks_exact(cols).enumerate() {
        for (slot, value) in tile[r..].iter_mut().step_by(height).zip(row) {
            *slot = *value;
        }
    }
}

impl<'a> Job<'a> {
    fn run<L: Lanes>(&self, c: &Compute) {
        let panels: usize = self.weight.parts.iter().map(Part::panels).sum();
        let pairs = panels.div_ceil(2);
        let tasks = (pairs / 4).max(4 * c.threads()).min(pairs);
        let boundary = |i: usize| panels.min(i * pairs / tasks * 2);
        c.run(tasks, |i| self.panels::<L>(boundary(i)..boundary(i + 1)));
    }

    /// Panels counted over all parts.
    fn panels<L: Lanes>(&self, panels: Range<usize>) {
        let mut base = 0;
        for part in &self.weight.parts {
            let from = panels.start.max(base) - base;
            let to = panels.end.min(base + part.panels()).saturating_sub(base);
            if self.n <= FEW_ROWS {
                for first in (from..to).step_by(fused::PANELS) {
                    self.direct::<L>(part, first..to.min(first + fused::PANELS));
                }
            } else {
                for first in (from..to).step_by(PANELS) {
                    self.chunked::<L>(part, first..to.min(first + PANELS));
                }
            }
            base += part.panels();
        }
    }

    /// A few token rows.
    fn direct<L: Lanes>(&self, part: &Part, panels: Range<usize>) {
        let mut sums: Sums = [[0.0; PANELS * LANES]; ROWS];
        let operands = Direct {
            panel: part.panel(panels.start),
            panel_bytes: part.panel_bytes,
            cols: self.weight.padded_cols(),
            x: self.x.as_ptr(),
            sums: sums.as_mut_ptr().cast(),
        };
        // SAFETY: `x` holds n rows, the part these panels, the sums FEW_ROWS rows of them.
        unsafe { fused::multiply_all::<L>(part.dtype, &operands, self.n, panels.len()) };
        self.finish(0..self.n, &part.outputs(&panels), &mut sums, true);
    }

    /// Any number of token rows, chunk after chunk of the columns.
    fn chunked<L: Lanes>(&self, part: &Part, panels: Range<usize>) {
        let cols = self.weight.padded_cols();
        let chunk = cols.div_ceil(cols.div_ceil(CHUNK)).next_multiple_of(BLOCK);
        PANEL_SCRATCH.with_borrow_mut(|scratch| {
            let bytes = PANELS * chunk * LANES * size_of::<f32>();
            if size_of_val(scratch.as_slice()) < bytes {
                *scratch = pack::zeroed(bytes);
            }
            for from in (0..cols).step_by(chunk) {
                let chunk = from..cols.min(from + chunk);
                let weights = decode::<L>(part, &panels, &chunk, scratch);
                for row in (0..self.n).step_by(ROWS) {
                    self.tile::<L>(row, &part.outputs(&panels), &chunk, weights);
                }
            }
        });
    }

    /// Adds one chunk of columns to one tile's sums, which rest in `out` between chunks.
    fn tile<L: Lanes>(
        &self,
        row: usize,
        outputs: &Range<usize>,
        chunk: &Range<usize>,
        (w, w_stride): (*const f32, usize),
    ) {
        let cols = self.weight.padded_cols();
        let height = tile_rows(row, self.n);
        let rows = row..self.n.min(row + height);
        let mut sums: Sums = [[0.0; PANELS * LANES]; ROWS];
        if chunk.start > 0 {
            for (r, sums) in rows.clone().zip(&mut sums) {
                sums[..outputs.len()].copy_from_slice(self.out_row(r, outputs));
            }
        }
        let operands = Operands {
            cols: chunk.len(),
            x: self.x[row * cols + chunk.start * height..].as_ptr(),
            x_stride: height,
            w,
            w_stride,
            sums: sums.as_mut_ptr().cast(),
        };
        // SAFETY: the tile's columns, the decoded panels and the sums cover `height` rows and these outputs' panels.
        unsafe { tile::multiply_all::<L>(&operands, height, outputs.len().div_ceil(LANES)) };
        self.finish(rows, outputs, &mut sums, chunk.end == cols);
    }

    /// Moves sums to `out`; the last time with the bias.
    fn finish(&self, rows: Range<usize>, outputs: &Range<usize>, sums: &mut Sums, last: bool) {
        for (row, sums) in rows.zip(sums) {
            let sums = &mut sums[..outputs.len()];
            if let Some(bias) = self.bias.filter(|_| last) {
                for (sum, bias) in sums.iter_mut().zip(&bias[outputs.clone()]) {
                    *sum += bias;
                }
            }
            self.out_row(row, outputs).copy_from_slice(sums);
        }
    }

    /// One token's share of the outputs, which belong to the calling task alone.
    fn out_row(&self, row: usize, outputs: &Range<usize>) -> &'a mut [f32] {
        let at = row * self.weight.rows;
        // SAFETY: tasks have disjoint outputs, and a task holds one such slice at a time.
        unsafe { self.out.slice(at + outputs.start..at + outputs.end) }
    }
}

/// A chunk's weights as f32 and the distance of its panels: in `scratch`, or where they are.
fn decode<L: Lanes>(
    part: &Part,
    panels: &Range<usize>,
    chunk: &Range<usize>,
    scratch: &mut [Line],
) -> (*const f32, usize) {
    if part.dtype == GgmlDType::F32 {
        let column = part.panel(panels.start).wrapping_add(chunk.start * LANES * 4);
        #[expect(clippy::cast_ptr_alignment, reason = "the data starts at a cache line, panels are multiples of it")]
        return (column.cast::<f32>(), part.panel_bytes / 4);
    }
    let stride = chunk.len() * LANES;
    let out = scratch.as_mut_ptr().cast::<f32>();
    for (i, panel) in panels.clone().enumerate() {
        let columns = Columns { panel: part.panel(panel), from: chunk.start, to: chunk.end };
        // SAFETY: a chunk is whole blocks of this panel, and `scratch` holds PANELS chunks.
        unsafe { with_codec!(part.dtype, C => L::decode::<C>(&columns, out.add(i * stride))) };
    }
    (out, stride)
}

/// Decodes one row of a part.
pub(super) fn row(isa: Isa, part: &Part, row: usize, out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => decode_row::<Avx512>(part, row, out),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => decode_row::<Avx2>(part, row, out),
        Isa::Portable => decode_row::<Portable>(part, row, out),
    }
}

fn decode_row<L: Lanes>(part: &Part, row: usize, out: &mut [f32]) {
    let panel = part.panel(row / LANES);
    let mut block = [[0f32; LANES]; BLOCK];
    for (i, out) in out.chunks_mut(BLOCK).enumerate() {
        let columns = Columns { panel, from: i * BLOCK, to: (i + 1) * BLOCK };
        let to = block.as_mut_ptr().cast();
        // SAFETY: a block of this panel, which is padded to whole blocks.
        unsafe { with_codec!(part.dtype, C => L::decode::<C>(&columns, to)) };
        for (out, column) in out.iter_mut().zip(&block) {
            *out = column[row % LANES];
        }
    }
}

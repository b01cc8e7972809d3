//! The matrix product on the CPU. Panels of the weight are dealt out to the threads in pairs. A
//! thread multiplies a pair with all token rows while the pair is in its cache.

use super::integer::{self, IntegerLanes};
use super::rounding::{self, Rounded};
use super::tile::{self, DenseLanes, PANELS, PanelOperands, ROWS};
use super::{Weight, WeightPart, format};
use crate::Compute;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512};
use crate::simd::{Isa, LANES, Portable};
use crate::storage::Parts;
use std::cell::RefCell;
use std::ops::Range;

thread_local! {
    /// The calling thread's activations in the layouts that the products read.
    static SCRATCH: RefCell<ActivationScratch> = RefCell::default();
}

#[derive(Default)]
struct ActivationScratch {
    /// For dense parts of the weight: tiles one after another, each `[cols][tile rows]`.
    tiles: Vec<f32>,
    /// For quantised parts of the weight: `[n][blocks]`.
    rounded: Vec<Rounded>,
}

struct Matmul<'a> {
    weight: &'a Weight,
    bias: Option<&'a [f32]>,
    x: &'a ActivationScratch,
    n: usize,
    out: Parts<'a>,
}

/// `out[n, rows] = x[n, cols] · Wᵀ (+ bias)`; sizes have been checked.
pub(super) fn run(
    isa: Isa,
    c: &Compute,
    weight: &Weight,
    bias: Option<&[f32]>,
    x: &[f32],
    out: &mut [f32],
) {
    SCRATCH.with_borrow_mut(|scratch| {
        if weight.is_quantised() {
            scratch.round(isa, c, x);
        }
        if !weight.parts.iter().all(WeightPart::is_quantised) {
            scratch.transpose_tiles(c, x, weight.cols);
        }
        let matmul =
            Matmul { weight, bias, x: scratch, n: x.len() / weight.cols, out: Parts::new(out) };
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => matmul.run::<Avx512>(c),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => matmul.run::<Avx2>(c),
            Isa::Portable => matmul.run::<Portable>(c),
        }
    });
}

/// Rows of the tile that starts at `row`: 12, or the smallest tile that holds the rows that are
/// left (padded with zeros).
fn tile_rows(row: usize, n: usize) -> usize {
    match n - row {
        1 => 1,
        2 => 2,
        3 | 4 => 4,
        5..=8 => 8,
        _ => ROWS,
    }
}

/// Blocks that one task rounds: enough to be worth handing to another thread.
const BLOCKS_PER_TASK: usize = 256;

impl ActivationScratch {
    fn round(&mut self, isa: Isa, c: &Compute, x: &[f32]) {
        let blocks = x.len() / format::BLOCK;
        grow(&mut self.rounded, blocks, Rounded::ZERO);
        c.run_chunks(&mut self.rounded[..blocks], BLOCKS_PER_TASK, |start, rounded| {
            let x = &x[start * format::BLOCK..][..rounded.len() * format::BLOCK];
            rounding::round_all(isa, x, rounded);
        });
    }

    fn transpose_tiles(&mut self, c: &Compute, x: &[f32], cols: usize) {
        let n = x.len() / cols;
        let size = n.next_multiple_of(ROWS) * cols;
        grow(&mut self.tiles, size, 0.0);
        c.run_chunks(&mut self.tiles[..size], ROWS * cols, |start, tile| {
            let rows = tile_rows(start / cols, n);
            let x = &x[start..x.len().min(start + rows * cols)];
            transpose(x, cols, rows, &mut tile[..rows * cols]);
        });
    }
}

fn grow<T: Clone>(buffer: &mut Vec<T>, len: usize, value: T) {
    if buffer.len() < len {
        buffer.resize(len, value);
    }
}

/// Transposes `[rows.len() / cols][cols]` to `[cols][height]`; rows that are missing become zero.
fn transpose(rows: &[f32], cols: usize, height: usize, tile: &mut [f32]) {
    tile.fill(0.0);
    for (r, row) in rows.chunks_exact(cols).enumerate() {
        for (slot, value) in tile[r..].iter_mut().step_by(height).zip(row) {
            *slot = *value;
        }
    }
}

impl WeightPart {
    fn operands<X>(
        &self,
        panels: &Range<usize>,
        x: &[X],
        (depth, x_stride): (usize, usize),
        (out, stride): (*mut f32, usize),
    ) -> PanelOperands<X> {
        let (panel, panel_bytes) = (self.panels(panels.clone()).as_ptr(), self.panel_bytes);
        PanelOperands { depth, x: x.as_ptr(), x_stride, panel, panel_bytes, out, stride }
    }
}

impl Matmul<'_> {
    fn run<L: DenseLanes + IntegerLanes>(&self, c: &Compute) {
        let panels: usize = self.weight.parts.iter().map(WeightPart::panel_count).sum();
        let pairs = panels.div_ceil(PANELS);
        let tasks = (pairs / 4).max(4 * c.threads()).min(pairs);
        let boundary = |i: usize| panels.min(i * pairs / tasks * PANELS);
        c.run(tasks, |i| self.panels::<L>(boundary(i)..boundary(i + 1)));
    }

    /// Multiplies a range of panels, which are numbered over all parts.
    fn panels<L: DenseLanes + IntegerLanes>(&self, panels: Range<usize>) {
        let mut base = 0;
        for part in &self.weight.parts {
            let from = panels.start.max(base) - base;
            let to = panels.end.min(base + part.panel_count()).saturating_sub(base);
            for first in (from..to).step_by(PANELS) {
                self.multiply::<L>(part, first..to.min(first + PANELS));
            }
            base += part.panel_count();
        }
    }

    /// Multiplies all token rows by up to `PANELS` panels. The bias is added last.
    fn multiply<L: DenseLanes + IntegerLanes>(&self, part: &WeightPart, panels: Range<usize>) {
        let (outputs, count) = (part.outputs(&panels), panels.len());
        let mut padded = [0.0; ROWS * PANELS * LANES];
        for row in (0..self.n).step_by(ROWS) {
            let rows = row..self.n.min(row + ROWS);
            // The last panel may have outputs that do not exist, and a dense tile rows.
            let exact = outputs.len() == panels.len() * LANES
                && (part.is_quantised() || rows.len() == ROWS);
            let (out, stride) = if exact {
                (self.out.at(row * self.weight.rows + outputs.start), self.weight.rows)
            } else {
                (padded.as_mut_ptr(), PANELS * LANES)
            };
            if part.is_quantised() {
                let blocks = self.weight.cols / format::BLOCK;
                let x = &self.x.rounded[rows.start * blocks..rows.end * blocks];
                let operands = part.operands(&panels, x, (blocks, blocks), (out, stride));
                // SAFETY: the blocks and the outputs cover the rows, the part these panels.
                unsafe { integer::multiply_all::<L>(part.dtype, &operands, rows.len(), count) };
            } else {
                let (cols, height) = (self.weight.cols, tile_rows(row, self.n));
                let x = &self.x.tiles[row * cols..(row + height) * cols];
                let operands = part.operands(&panels, x, (cols, height), (out, stride));
                // SAFETY: the tile and the outputs cover `height` rows, the part these panels.
                unsafe { tile::multiply_all::<L>(part.dtype, &operands, height, count) };
            }
            for (row, sums) in rows.zip(padded.chunks_exact(PANELS * LANES)) {
                // SAFETY: tasks have disjoint outputs, and a task holds one such slice at a time.
                let out = unsafe {
                    self.out.slice(
                        row * self.weight.rows + outputs.start
                            ..row * self.weight.rows + outputs.end,
                    )
                };
                if !exact {
                    out.copy_from_slice(&sums[..outputs.len()]);
                }
                if let Some(bias) = self.bias {
                    out.iter_mut().zip(&bias[outputs.clone()]).for_each(|(out, bias)| *out += bias);
                }
            }
        }
    }
}

//! The matrix product on the CPU. Panels of the weight are dealt out to the threads in pairs. A
//! thread multiplies a pair with all token rows while the pair is in its cache; many rows it
//! multiplies by a piece of the columns of several pairs, then by the next piece. Rows that go to
//! different matrices of a stack are gathered by matrix first.

use super::format;
use super::integer::{self, IntegerProduct, PIECE, QuantisedOperands};
use super::machines::Plain;
#[cfg(target_arch = "x86_64")]
use super::machines::{ByteProduct, HalfVnni, Vnni, Words};
#[cfg(target_arch = "aarch64")]
use super::machines::{DotProduct, Widening};
use super::rounding::Rounded;
use super::tile::{self, PANELS, PanelOperands, ROWS};
use super::weight::{Weight, WeightPart};
use crate::Compute;
use crate::parts::Parts;
use crate::simd::{Isa, LANES};
#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;
use std::cell::RefCell;
use std::ops::Range;

thread_local! {
    /// The calling thread's activations in the layouts that the products read.
    static SCRATCH: RefCell<ActivationScratch> = RefCell::default();
    /// This thread's sums of products with many rows.
    static SUMS: RefCell<Vec<f32>> = RefCell::default();
}

#[derive(Default)]
struct ActivationScratch {
    /// For other parts of the weight: tiles one after another, each `[cols][tile rows]`.
    tiles: Vec<f32>,
    /// For parts of the weight with integer codes: `[n][blocks]`.
    rounded: Vec<Rounded>,
}

/// The rows of activations that a product takes, and the rows of the output where the results go.
#[derive(Clone, Copy)]
enum RowMap<'a> {
    /// Rows 0..n, in order.
    All(usize),
    /// Row i of the product is for the choice `choices[i]`, or for none if that is [`NO_CHOICE`].
    /// It reads row `choice / choices_per_row` of the activations and writes row `choice`.
    Chosen { choices: &'a [u32], choices_per_row: usize },
}

const NO_CHOICE: u32 = u32::MAX;

impl RowMap<'_> {
    fn len(self) -> usize {
        match self {
            Self::All(rows) => rows,
            Self::Chosen { choices, .. } => choices.len(),
        }
    }

    /// The row of the activations that a row of the product reads, if it is one.
    fn source(self, row: usize) -> Option<usize> {
        match self {
            Self::All(rows) => (row < rows).then_some(row),
            Self::Chosen { choices, choices_per_row } => choices
                .get(row)
                .filter(|choice| **choice != NO_CHOICE)
                .map(|choice| *choice as usize / choices_per_row),
        }
    }

    fn target(self, row: usize) -> usize {
        match self {
            Self::All(_) => row,
            Self::Chosen { choices, .. } => choices[row] as usize,
        }
    }
}

/// The rows of a product that are multiplied by one matrix.
struct RowGroup {
    /// The matrix's parts among those of the weight.
    parts: Range<usize>,
    /// Its first output among those of the weight.
    first_output: usize,
    /// They begin at a multiple of `ROWS`.
    rows: Range<usize>,
}

/// Pairs of panels that a thread multiplies one after the other where there are many. All but the
/// first are prefetched.
const PAIRS_PER_TASK: usize = 16;

/// Panels and rows of a product with many rows that are multiplied one piece of the columns after
/// the other. Their sums, and a piece of the rows' activations, stay in the second level of the
/// cache.
const PANELS_TOGETHER: usize = 8;
const ROWS_TOGETHER: usize = 43 * ROWS;

struct Matmul<'a> {
    weight: &'a Weight,
    groups: &'a [RowGroup],
    map: RowMap<'a>,
    bias: Option<&'a [f32]>,
    x: &'a ActivationScratch,
    out: Parts<'a>,
    /// The length of a row of the output.
    width: usize,
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
    let x = &weight.gathered(x);
    let n = x.len() / weight.cols;
    let group = RowGroup { parts: 0..weight.parts.len(), first_output: 0, rows: 0..n };
    Product { weight, groups: &[group], map: RowMap::All(n), bias, x, out }.run(isa, c);
}

/// Multiplies each row by the matrices of some of the `experts` that are stacked in `weight`, all
/// with the same rows and number of parts. The choices `order[begins[e]..begins[e + 1]]` are those
/// of expert e: a choice is a row of `out`, and reads row `choice / choices_per_row` of `x`.
pub(crate) fn run_chosen(
    c: &Compute,
    weight: &Weight,
    bias: Option<&[f32]>,
    (begins, order): (&[u32], &[u32]),
    choices_per_row: usize,
    x: &[f32],
    out: &mut [f32],
) {
    let x = &weight.gathered(x);
    let experts = begins.len() - 1;
    let (parts, rows) = (weight.parts.len() / experts, weight.rows / experts);
    let (mut groups, mut choices) = (Vec::new(), Vec::new());
    for (expert, span) in begins.windows(2).enumerate().filter(|(_, span)| span[0] < span[1]) {
        let first = choices.len();
        choices.extend(&order[span[0] as usize..span[1] as usize]);
        groups.push(RowGroup {
            parts: expert * parts..(expert + 1) * parts,
            first_output: expert * rows,
            rows: first..choices.len(),
        });
        choices.resize(choices.len().next_multiple_of(ROWS), NO_CHOICE);
    }
    let map = RowMap::Chosen { choices: &choices, choices_per_row };
    Product { weight, groups: &groups, map, bias, x, out }.run(Isa::best(), c);
}

/// The operands of a product and its output. The sizes of the slices have been checked.
struct Product<'a> {
    weight: &'a Weight,
    groups: &'a [RowGroup],
    map: RowMap<'a>,
    bias: Option<&'a [f32]>,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Product<'_> {
    fn run(self, isa: Isa, c: &Compute) {
        let run = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if c.byte_activations() => Self::run_by::<Vnni<1>>,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Self::run_by::<Vnni<2>>,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni if c.byte_activations() => Self::run_by::<HalfVnni<1>>,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Self::run_by::<HalfVnni<2>>,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => match (self.weight.has_small_codes(), c.byte_activations()) {
                (true, true) => Self::run_by::<ByteProduct<1>>,
                (false, true) => Self::run_by::<Words<1>>,
                (true, false) if self.has_single_rows() => Self::run_by::<ByteProduct<2>>,
                (_, false) => Self::run_by::<Words<2>>,
            },
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => match (is_aarch64_feature_detected!("i8mm"), c.byte_activations()) {
                (true, true) => Self::run_by::<DotProduct<true, 1>>,
                (true, false) => Self::run_by::<DotProduct<true, 2>>,
                (false, true) => Self::run_by::<DotProduct<false, 1>>,
                (false, false) if isa.has_byte_products() => Self::run_by::<DotProduct<false, 2>>,
                (false, false) => Self::run_by::<Widening>,
            },
            Isa::Portable => Self::run_by::<Plain>,
        };
        run(self, c);
    }

    /// Whether each matrix is multiplied by one row.
    #[cfg(target_arch = "x86_64")]
    fn has_single_rows(&self) -> bool {
        self.groups.iter().all(|group| group.rows.len() == 1)
    }

    /// Computes it with the integer product and the vectors of an instruction set, which the
    /// machine has.
    fn run_by<M: IntegerProduct>(self, c: &Compute) {
        let Self { weight, groups, map, bias, x, out } = self;
        let first = groups.first().map_or(0..0, |group| group.parts.clone());
        let width = weight.parts[first].iter().map(|part| part.rows).sum();
        SCRATCH.with_borrow_mut(|scratch| {
            if weight.rounds_activations() {
                scratch.round::<M>(c, x, weight.cols, map);
            }
            if !weight.parts.iter().all(WeightPart::rounds_activations) {
                scratch.transpose_tiles(c, x, weight.cols, map);
            }
            let out = Parts::new(out);
            Matmul { weight, groups, map, bias, x: scratch, out, width }.run::<M>(c);
        });
    }
}

/// Rows of a tile that holds up to twelve: 12, or the smallest tile that holds the rows that are
/// there (padded with zeros).
fn tile_rows(rows: usize) -> usize {
    match rows {
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
    fn round<M: IntegerProduct>(&mut self, c: &Compute, x: &[f32], cols: usize, map: RowMap) {
        let per_row = cols / format::BLOCK;
        let blocks = map.len() * per_row;
        // Products with many rows read whole tiles of rows.
        grow(&mut self.rounded, map.len().next_multiple_of(ROWS) * per_row, Rounded::ZERO);
        c.run_chunks(&mut self.rounded[..blocks], BLOCKS_PER_TASK, |start, mut rounded| {
            let mut at = start;
            while !rounded.is_empty() {
                let (row, first) = (at / per_row, at % per_row);
                let count = rounded.len().min(per_row - first);
                let (these, rest) = rounded.split_at_mut(count);
                if let Some(row) = map.source(row) {
                    let x = &x[row * cols + first * format::BLOCK..][..count * format::BLOCK];
                    // SAFETY: the machine has the instructions of `M`.
                    unsafe { M::round_all(x, these) };
                }
                (at, rounded) = (at + count, rest);
            }
        });
    }

    fn transpose_tiles(&mut self, c: &Compute, x: &[f32], cols: usize, map: RowMap) {
        let size = map.len().next_multiple_of(ROWS) * cols;
        grow(&mut self.tiles, size, 0.0);
        c.run_chunks(&mut self.tiles[..size], ROWS * cols, |start, tile| {
            let first = start / cols;
            let sources = (first..first + ROWS).map_while(|row| map.source(row));
            let rows = sources.map(|row| &x[row * cols..(row + 1) * cols]);
            let height = tile_rows(rows.clone().count());
            transpose(rows, height, &mut tile[..height * cols]);
        });
    }
}

fn grow<T: Clone>(buffer: &mut Vec<T>, len: usize, value: T) {
    if buffer.len() < len {
        buffer.resize(len, value);
    }
}

/// Transposes rows to `[cols][height]`; rows that are missing become zero.
fn transpose<'a>(rows: impl Iterator<Item = &'a [f32]>, height: usize, tile: &mut [f32]) {
    tile.fill(0.0);
    for (r, row) in rows.enumerate() {
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
        PanelOperands { depth, x: x.as_ptr(), x_stride, panel, panel_bytes, out, stride, ahead: 0 }
    }
}

impl Matmul<'_> {
    fn run<M: IntegerProduct>(&self, c: &Compute) {
        let of_group = |group: &RowGroup| {
            self.weight.parts[group.parts.clone()]
                .iter()
                .map(WeightPart::panel_count)
                .sum::<usize>()
        };
        let panels: usize = self.groups.iter().map(of_group).sum();
        let pairs = panels.div_ceil(PANELS);
        let tasks = (pairs / PAIRS_PER_TASK).max(4 * c.threads()).min(pairs);
        let boundary = |i: usize| panels.min(i * pairs / tasks * PANELS);
        c.run(tasks, |i| self.panels::<M>(boundary(i)..boundary(i + 1)));
    }

    /// Multiplies a range of panels, which are numbered over all parts of all groups.
    fn panels<M: IntegerProduct>(&self, panels: Range<usize>) {
        let mut base = 0;
        for group in self.groups {
            for part in &self.weight.parts[group.parts.clone()] {
                let from = panels.start.max(base) - base;
                let to = panels.end.min(base + part.panel_count()).saturating_sub(base);
                if part.rounds_activations() && group.rows.len() >= M::MANY_ROWS {
                    for first in (from..to).step_by(PANELS_TOGETHER) {
                        let panels = first..to.min(first + PANELS_TOGETHER);
                        self.multiply_many::<M>(group, part, panels);
                    }
                } else {
                    for first in (from..to).step_by(PANELS) {
                        self.multiply::<M>(group, part, first..to.min(first + PANELS), to);
                    }
                }
                base += part.panel_count();
            }
        }
    }

    /// Multiplies the many rows of a group by up to `PANELS_TOGETHER` panels.
    fn multiply_many<M: IntegerProduct>(
        &self,
        group: &RowGroup,
        part: &WeightPart,
        panels: Range<usize>,
    ) {
        const { assert!(ROWS.is_multiple_of(M::TILE.0), "whole tiles read no more rounded rows") };
        let blocks = self.weight.cols / format::BLOCK;
        let pairs = panels.len().div_ceil(PANELS);
        SUMS.with_borrow_mut(|sums| {
            for first in group.rows.clone().step_by(ROWS_TOGETHER) {
                let rows = first..group.rows.end.min(first + ROWS_TOGETHER);
                let size = rows.len().next_multiple_of(M::TILE.0) * PANELS * LANES;
                grow(sums, pairs * size, 0.0);
                let x = &self.x.rounded[first * blocks..];
                for piece in (0..blocks).step_by(PIECE) {
                    let piece = piece..blocks.min(piece + PIECE);
                    for (sums, pair) in sums.chunks_mut(size).zip(panels.clone().step_by(PANELS)) {
                        let pair = pair..panels.end.min(pair + PANELS);
                        let out = (sums.as_mut_ptr(), M::TILE.1 * LANES);
                        let operands = QuantisedOperands {
                            ahead: PANELS * part.panel_bytes,
                            ..part.operands(&pair, x, (blocks, blocks), out)
                        };
                        let (dtype, piece) = (part.dtype, piece.clone());
                        // SAFETY: the blocks and the sums cover the rows and those that make
                        // their tiles whole, the part these panels.
                        unsafe {
                            integer::add_piece::<M>(
                                dtype,
                                &operands,
                                piece,
                                rows.len(),
                                pair.len(),
                            );
                        }
                    }
                }
                self.store_sums::<M>(group, part, &panels, rows, sums);
            }
        });
    }

    /// Stores the sums of many rows with some panels. The bias is added last.
    fn store_sums<M: IntegerProduct>(
        &self,
        group: &RowGroup,
        part: &WeightPart,
        panels: &Range<usize>,
        rows: Range<usize>,
        sums: &[f32],
    ) {
        let Range { start, end } = part.outputs(panels);
        let (height, width) = (rows.len().next_multiple_of(M::TILE.0), M::TILE.1 * LANES);
        for (i, row) in rows.enumerate() {
            let at = self.map.target(row) * self.width + start - group.first_output;
            // SAFETY: tasks have disjoint outputs, and a task holds one such slice at a time.
            let out = unsafe { self.out.slice(at..at + end - start) };
            for (tile, out) in out.chunks_mut(width).enumerate() {
                out.copy_from_slice(&sums[(tile * height + i) * width..][..out.len()]);
            }
            self.add_bias(out, start);
        }
    }

    /// Adds the bias of the outputs from `first` on to one row's.
    fn add_bias(&self, out: &mut [f32], first: usize) {
        if let Some(bias) = self.bias {
            out.iter_mut().zip(&bias[first..]).for_each(|(out, bias)| *out += bias);
        }
    }

    /// Multiplies all rows of a group by up to `PANELS` panels; those up to `end_of_task` follow.
    /// The bias is added last.
    fn multiply<M: IntegerProduct>(
        &self,
        group: &RowGroup,
        part: &WeightPart,
        panels: Range<usize>,
        end_of_task: usize,
    ) {
        let Range { start, end } = part.outputs(&panels);
        let (outputs, count) = (start - group.first_output..end - group.first_output, panels.len());
        let mut padded = [0.0; ROWS * PANELS * LANES];
        for row in group.rows.clone().step_by(ROWS) {
            let rows = row..group.rows.end.min(row + ROWS);
            // The last panel may have outputs that do not exist, a dense tile rows that do not, and
            // rows that were chosen do not follow each other in the output.
            let exact = outputs.len() == panels.len() * LANES
                && (part.rounds_activations() || rows.len() == ROWS)
                && (matches!(self.map, RowMap::All(_)) || rows.len() == 1);
            let (out, stride) = if exact {
                (self.out.at(self.map.target(row) * self.width + outputs.start), self.width)
            } else {
                (padded.as_mut_ptr(), PANELS * LANES)
            };
            if part.rounds_activations() {
                let blocks = self.weight.cols / format::BLOCK;
                let x = &self.x.rounded[rows.start * blocks..rows.end * blocks];
                let fetches = rows.end == group.rows.end && panels.end < end_of_task;
                let operands = QuantisedOperands {
                    ahead: if fetches { PANELS * part.panel_bytes } else { 0 },
                    ..part.operands(&panels, x, (blocks, blocks), (out, stride))
                };
                let is_first = row == group.rows.start;
                let rows = rows.len();
                // SAFETY: the blocks and the outputs cover the rows, the part these panels.
                unsafe { integer::multiply_all::<M>(part.dtype, &operands, rows, count, is_first) };
            } else {
                let (cols, height) = (self.weight.cols, tile_rows(rows.len()));
                let x = &self.x.tiles[row * cols..(row + height) * cols];
                let operands = part.operands(&panels, x, (cols, height), (out, stride));
                // SAFETY: the tile and the outputs cover `height` rows, the part these panels.
                unsafe { tile::multiply_all::<M::Lanes>(part.dtype, &operands, height, count) };
            }
            for (row, sums) in rows.zip(padded.chunks_exact(PANELS * LANES)) {
                let at = self.map.target(row) * self.width;
                // SAFETY: tasks have disjoint outputs, and a task holds one such slice at a time.
                let out = unsafe { self.out.slice(at + outputs.start..at + outputs.end) };
                if !exact {
                    out.copy_from_slice(&sums[..outputs.len()]);
                }
                self.add_bias(out, start);
            }
        }
    }
}

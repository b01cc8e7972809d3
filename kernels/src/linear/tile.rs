//! The micro-kernel: a register tile of token rows by outputs, summed along the columns in order. Each sum is one chain of
//! fused multiply-adds from column 0 upwards, whatever the tile's size, so tile shapes never show in the result.

use super::lanes::{LANES, Lanes};

/// Panels of a tile at most, and token rows.
pub(super) const PANELS: usize = 4;
pub(super) const ROWS: usize = 12;

/// The sums of a tile: `[row][PANELS * 16]`.
pub(super) type Sums = [[f32; PANELS * LANES]; ROWS];

pub(super) struct Operands {
    pub cols: usize,
    /// `[cols][x_stride]`, the tile's rows side by side.
    pub x: *const f32,
    pub x_stride: usize,
    /// `[cols][16]` per panel, panels `w_stride` apart.
    pub w: *const f32,
    pub w_stride: usize,
    /// Added to. The first row and panel of the tile; rows are `PANELS * 16` apart.
    pub sums: *mut f32,
}

/// Adds `x · W` to the sums of `rows` token rows and `panels` panels, in register tiles.
///
/// # Safety
/// The operands' pointers cover the tile, `rows` is one of 1, 2, 4, 8, 12, and the machine has `L`'s instructions.
pub(super) unsafe fn multiply_all<L: Lanes>(whole: &Operands, rows: usize, panels: usize) {
    let height = rows.min(L::ROWS);
    let width = (L::ACCUMULATORS / height).clamp(1, PANELS);
    for row in (0..rows).step_by(height) {
        for panel in (0..panels).step_by(width) {
            // SAFETY: stays within the operands.
            unsafe {
                let part = Operands {
                    x: whole.x.add(row),
                    w: whole.w.add(panel * whole.w_stride),
                    sums: whole.sums.add((row * PANELS + panel) * LANES),
                    ..*whole
                };
                dispatch::<L>(&part, height.min(rows - row), width.min(panels - panel));
            }
        }
    }
}

unsafe fn dispatch<L: Lanes>(o: &Operands, rows: usize, panels: usize) {
    // SAFETY: the caller's contract is passed on.
    unsafe {
        match (rows, panels) {
            (1, 1) => L::multiply::<1, 1>(o),
            (1, 2) => L::multiply::<1, 2>(o),
            (1, 3) => L::multiply::<1, 3>(o),
            (1, 4) => L::multiply::<1, 4>(o),
            (2, 1) => L::multiply::<2, 1>(o),
            (2, 2) => L::multiply::<2, 2>(o),
            (2, 3) => L::multiply::<2, 3>(o),
            (2, 4) => L::multiply::<2, 4>(o),
            (4, 1) => L::multiply::<4, 1>(o),
            (4, 2) => L::multiply::<4, 2>(o),
            (4, 3) => L::multiply::<4, 3>(o),
            (4, 4) => L::multiply::<4, 4>(o),
            (8, 1) => L::multiply::<8, 1>(o),
            (8, 2) => L::multiply::<8, 2>(o),
            (8, 3) => L::multiply::<8, 3>(o),
            (12, 1) => L::multiply::<12, 1>(o),
            (12, 2) => L::multiply::<12, 2>(o),
            _ => unreachable!("no register tile of {rows} rows and {panels} panels"),
        }
    }
}

#[inline(always)]
pub(super) unsafe fn multiply<L: Lanes, const R: usize, const P: usize>(o: &Operands) {
    // SAFETY: the operands cover R rows and P panels.
    unsafe {
        let at = |r: usize, p: usize| o.sums.add((r * PANELS + p) * LANES);
        let mut sums = [[L::splat(0.0); P]; R];
        for (r, row) in sums.iter_mut().enumerate() {
            for (p, sum) in row.iter_mut().enumerate() {
                *sum = L::load(at(r, p));
            }
        }
        for k in 0..o.cols {
            let mut w = [L::splat(0.0); P];
            for (p, w) in w.iter_mut().enumerate() {
                *w = L::load(o.w.add(p * o.w_stride + k * LANES));
            }
            for (r, row) in sums.iter_mut().enumerate() {
                let x = L::splat(*o.x.add(k * o.x_stride + r));
                for (sum, w) in row.iter_mut().zip(w) {
                    *sum = L::fma(x, w, *sum);
                }
            }
        }
        for (r, row) in sums.iter().enumerate() {
            for (p, sum) in row.iter().enumerate() {
                L::store(at(r, p), *sum);
            }
        }
    }
}

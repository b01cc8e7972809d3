//! Few token rows: weights are decoded in registers and used at once. The sums are the same chains as the micro-kernel's.

use super::decode::{Codec, RUN, with_codec};
use super::lanes::{LANES, Lanes};
use super::tile::PANELS as SUM_PANELS;
use candle_core::quantized::GgmlDType;

/// Panels worked on together: two chains of sums hide each other's latency behind the decoding.
pub(super) const PANELS: usize = 2;

pub(super) struct Direct {
    /// The first panel; panels are `panel_bytes` apart.
    pub panel: *const u8,
    pub panel_bytes: usize,
    pub cols: usize,
    /// `[rows][cols]`.
    pub x: *const f32,
    /// Written, laid out as in `tile::Operands`.
    pub sums: *mut f32,
}

/// Sets the sums of `rows` token rows and up to `PANELS` panels.
///
/// # Safety
/// The operands cover all of them, the panels are packed as `dtype`, and the machine has `L`'s instructions.
pub(super) unsafe fn multiply_all<L: Lanes>(dtype: GgmlDType, whole: &Direct, rows: usize, panels: usize) {
    let mut row = 0;
    while row < rows {
        let height = match rows - row {
            1 => 1,
            2 | 3 => 2,
            _ => 4,
        };
        // SAFETY: stays within the operands.
        unsafe {
            let part =
                Direct { x: whole.x.add(row * whole.cols), sums: whole.sums.add(row * SUM_PANELS * LANES), ..*whole };
            with_codec!(dtype, C => dispatch::<L, C>(&part, height, panels));
        }
        row += height;
    }
}

unsafe fn dispatch<L: Lanes, C: Codec>(o: &Direct, rows: usize, panels: usize) {
    // SAFETY: the caller's contract is passed on.
    unsafe {
        match (rows, panels) {
            (1, 1) => L::multiply_direct::<C, 1, 1>(o),
            (1, 2) => L::multiply_direct::<C, 1, 2>(o),
            (2, 1) => L::multiply_direct::<C, 2, 1>(o),
            (2, 2) => L::multiply_direct::<C, 2, 2>(o),
            (4, 1) => L::multiply_direct::<C, 4, 1>(o),
            (4, 2) => L::multiply_direct::<C, 4, 2>(o),
            _ => unreachable!("no register tile of {rows} rows and {panels} panels"),
        }
    }
}

#[inline(always)]
pub(super) unsafe fn multiply<L: Lanes, C: Codec, const R: usize, const P: usize>(o: &Direct) {
    // SAFETY: the operands cover R rows and P panels.
    unsafe {
        let panel = |p: usize| o.panel.add(p * o.panel_bytes);
        let mut sums = [[L::splat(0.0); P]; R];
        for group in (0..o.cols).step_by(C::GROUP) {
            let mut scales = [(L::splat(0.0), L::splat(0.0)); P];
            for (p, scale) in scales.iter_mut().enumerate() {
                *scale = C::scale::<L>(panel(p), group);
            }
            for column in (group..group + C::GROUP).step_by(RUN) {
                for (p, scale) in scales.into_iter().enumerate() {
                    let values = C::run::<L>(panel(p), column, scale);
                    for (i, w) in values.into_iter().enumerate() {
                        for (r, row) in sums.iter_mut().enumerate() {
                            let x = L::splat(*o.x.add(r * o.cols + column + i));
                            row[p] = L::fma(x, w, row[p]);
                        }
                    }
                }
            }
        }
        for (r, row) in sums.into_iter().enumerate() {
            for (p, sum) in row.into_iter().enumerate() {
                L::store(o.sums.add((r * SUM_PANELS + p) * LANES), sum);
            }
        }
    }
}

//! The product with quantised weights: codes times rounded activations in integers, exact within a
//! group of columns, then scaled and added to an f32 chain over the groups in order. A result is
//! the same chain whatever the tile is.
//!
//! Steps, predicted and measured on one core of a Zen 4 whose f32 ceiling is 118 GFLOP/s
//! (`RESULTS.md` has the tables):
//! - Two byte products per sixteen-bit activation instead of f32 multiply-adds: twice the f32
//!   ceiling (236), less a fifth for putting bytes together and scaling, 190. Measured 181 to 192
//!   at 64 rows, 1.7 to 1.8 times the f32 path.
//! - Codes unpacked in registers by shift and mask, for any number of rows: one row 3 times faster
//!   or more than by f32 look-up. Measured 13 µs instead of 43 (Q4_1, 1536 × 576, in cache).
//! - Storing straight into the output: 7 % of a prefill was zeroing and copying. Measured: 2 %.
//! - Memory read in order, that is, the first rows take one panel at a time: two at once read 12
//!   GB/s, a plain loop 33. Twice as fast for one row. Measured in one thread: 2.1 times (Q4_0),
//!   1.6 (Q8_0), 2.0 (Q4_K_M), and 5 % for 8 and 16 rows (Q4_0).
//! - The next pair of panels is prefetched while the last rows are multiplied by a pair, since the
//!   hardware's prefetching ends with each panel. Predicted: the time of reading and that of
//!   multiplying overlap, 1.5 times as fast for 8 rows. Measured in two threads on a Zen 5, a model
//!   of 1.5 billion weights in Q4_K_M: 1.27 times for one row, 1.85 for 4, 1.59 for 8, 1.30 for 16.
//!   Spreading the prefetches over all rows of a pair, or leaving them to its first ones, is slower
//!   (0.86 to 0.97 of it for 8 and 16 rows).
//! - Activations rounded by the machine's own instructions: from 7 % of the time of 16 rows to 1.
//!   Measured: 0.8 % of a token's time, was 2.8.

use super::format::{BLOCK, Format, HeaderScale, Quant, Scales, with_format};
use super::rounding::Rounded;
use super::tile::{DenseLanes, PANELS, PanelOperands};
use crate::linear::WeightType;
use crate::simd::{LANES, Lanes};

/// The integer product of an instruction set with activations of some width.
///
/// # Safety
/// Every function needs the instructions of `Lanes`; `planes` points to a block's codes in the
/// format.
pub(super) trait IntegerProduct {
    type Lanes: DenseLanes;
    /// The codes of four consecutive columns of a panel.
    type Codes: Copy;
    /// The sums of a panel's products.
    type Sums: Copy;
    /// Token rows and panels of a register tile.
    const TILE: (usize, usize);
    /// Such tiles, one below the other, for which codes are unpacked once and kept in memory.
    const TILES: usize = 1;
    /// The number that `codes` subtracts from each code where the instructions take signed bytes.
    const BIAS: i32 = 0;

    /// Rounds a block of activations; the codes are in the order in which `dot` reads them.
    fn round(x: &[f32; BLOCK]) -> Rounded;
    unsafe fn start(offset: i32) -> Self::Sums;
    /// Sums that start with the offset times the zero of each output, less `BIAS`; `zeros` has
    /// sixteen.
    unsafe fn start_each(zeros: *const u8, offset: i32) -> Self::Sums;
    /// The codes of columns `4 * STEP..4 * STEP + 4`, or the numbers that they stand for, less
    /// `BIAS`.
    unsafe fn codes<Q: Quant, const STEP: usize>(planes: *const u8) -> Self::Codes;
    unsafe fn dot<Q: Quant, const STEP: usize>(
        sums: Self::Sums,
        codes: Self::Codes,
        x: &Rounded,
    ) -> Self::Sums;
    unsafe fn finish(sums: Self::Sums) -> Self::Lanes;
    /// Brings the line of the cache at an address, which need not be valid, into the second level.
    fn prefetch(_: *const u8) {}
    /// [`multiply`] compiled for this instruction set.
    unsafe fn multiply<Q: Quant, const R: usize, const P: usize, const T: usize>(
        operands: &QuantisedOperands,
    );
    /// [`round_all`] compiled for this instruction set.
    unsafe fn round_all(x: &[f32], out: &mut [Rounded]);
}

/// The entry points that compile [`multiply`] and [`round_all`] for an instruction set.
macro_rules! entry_points {
    ($($feature:literal)?) => {
        $(#[target_feature(enable = $feature)])?
        unsafe fn round_all(x: &[f32], out: &mut [Rounded]) {
            round_all::<Self>(x, out);
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn multiply<Q: Quant, const R: usize, const P: usize, const T: usize>(
            operands: &QuantisedOperands,
        ) {
            // SAFETY: the caller's contract is passed on.
            unsafe { multiply::<Self, Q, R, P, T>(operands) }
        }
    };
}
pub(super) use entry_points;

/// Rounds whole blocks of activations.
#[inline(always)]
pub(super) fn round_all<M: IntegerProduct>(x: &[f32], out: &mut [Rounded]) {
    for (x, out) in x.as_chunks().0.iter().zip(out) {
        *out = M::round(x);
    }
}

pub(super) type QuantisedOperands = PanelOperands<Rounded>;

/// Sets the outputs of `rows` token rows and up to `PANELS` panels, which are in the cache unless
/// the rows `are_first` to be multiplied by them.
///
/// # Safety
/// The operands cover all of them, the panels are packed as `dtype`, and the machine has `M`'s
/// instructions.
pub(super) unsafe fn multiply_all<M: IntegerProduct>(
    dtype: WeightType,
    whole: &QuantisedOperands,
    rows: usize,
    panels: usize,
    are_first: bool,
) {
    let mut row = 0;
    while row < rows {
        let most = (M::TILE.0 * M::TILES).min(rows - row);
        let height = [12, 8, 4, 2, 1].into_iter().find(|height| *height <= most).unwrap_or(1);
        // Panels that are not in the cache are taken one at a time, since memory is read fastest
        // in order.
        let width = if are_first && row == 0 { 1 } else { M::TILE.1 };
        for panel in (0..panels).step_by(width) {
            // SAFETY: stays within the operands.
            unsafe {
                let ahead = if row + height == rows { whole.ahead } else { 0 };
                let part = PanelOperands { ahead, ..whole.part(row * whole.depth, row, panel) };
                let width = width.min(panels - panel);
                with_format!(dtype, Q => dispatch::<M, Q>(&part, height, width));
            }
        }
        row += height;
    }
}

unsafe fn dispatch<M: IntegerProduct, Q: Quant>(o: &QuantisedOperands, rows: usize, panels: usize) {
    const { assert!(PANELS == 2) }
    // SAFETY: the caller's contract is passed on.
    unsafe {
        match (rows, panels) {
            (1, 1) => tile::<M, Q, 1, 1, 1>(o),
            (1, 2) => tile::<M, Q, 1, 2, 1>(o),
            (2, 1) => tile::<M, Q, 2, 1, 1>(o),
            (2, 2) => tile::<M, Q, 2, 2, 1>(o),
            (4, 1) => tile::<M, Q, 4, 1, 1>(o),
            (4, 2) => tile::<M, Q, 4, 2, 1>(o),
            (8, 1) => tile::<M, Q, 4, 1, 2>(o),
            (12, 1) => tile::<M, Q, 4, 1, 3>(o),
            _ => unreachable!("no register tile of {rows} rows and {panels} panels"),
        }
    }
}

/// [`multiply`] for a tile that the instruction set uses. The others are left out here, because
/// they would be most of what the compiler has to write.
unsafe fn tile<M: IntegerProduct, Q: Quant, const R: usize, const P: usize, const T: usize>(
    o: &QuantisedOperands,
) {
    if const { R <= M::TILE.0 && P <= M::TILE.1 && T <= M::TILES } {
        // SAFETY: the caller's contract is passed on.
        unsafe { M::multiply::<Q, R, P, T>(o) }
    } else {
        unreachable!("a register tile of {R} rows and {P} panels is too large")
    }
}

#[inline(always)]
pub(super) unsafe fn multiply<
    M: IntegerProduct,
    Q: Quant,
    const R: usize,
    const P: usize,
    const T: usize,
>(
    o: &QuantisedOperands,
) {
    let f = const { Q::FORMAT };
    let per_super = f.super_cols / BLOCK;
    // SAFETY: the operands cover T times R rows and P panels.
    unsafe {
        let mut sums = [[[M::Lanes::splat(0.0); P]; R]; T];
        for index in 0..o.depth / per_super {
            let headers = std::array::from_fn::<_, P, _>(|p| {
                o.panel.add(p * o.panel_bytes + index * f.super_bytes())
            });
            let mut scales = [header_scale::<M::Lanes>(&f, headers[0]); P];
            for p in 1..P {
                scales[p] = header_scale::<M::Lanes>(&f, headers[p]);
            }
            for i in 0..per_super {
                let blocks =
                    headers.map(|header| header.add(f.header_bytes() + i * f.block_bytes()));
                if o.ahead > 0 {
                    for block in blocks {
                        for line in (0..f.block_bytes()).step_by(CACHE_LINE) {
                            M::prefetch(block.wrapping_add(o.ahead + line));
                        }
                    }
                }
                let x = o.x.add(index * per_super + i);
                let block = PanelBlock { headers, panels: blocks, x, stride: o.depth };
                if f.group == BLOCK {
                    block.add::<M, Q, R, T, BOTH>(&scales, &mut sums);
                } else {
                    block.add::<M, Q, R, T, 0>(&scales, &mut sums);
                    block.add::<M, Q, R, T, 1>(&scales, &mut sums);
                }
            }
        }
        for (t, sums) in sums.into_iter().enumerate() {
            o.part(0, t * R, 0).store(sums);
        }
    }
}

const CACHE_LINE: usize = 64;

/// The value of `HALF` that stands for the whole block.
const BOTH: usize = 2;

/// A block of some panels, and that of the first row's activations; those of further rows are
/// `stride` blocks apart.
struct PanelBlock<const P: usize> {
    headers: [*const u8; P],
    panels: [*const u8; P],
    x: *const Rounded,
    stride: usize,
}

impl<const P: usize> PanelBlock<P> {
    /// Adds the products of one half of the block, or of both.
    #[inline(always)]
    unsafe fn add<
        M: IntegerProduct,
        Q: Quant,
        const R: usize,
        const T: usize,
        const HALF: usize,
    >(
        &self,
        scales: &[(M::Lanes, M::Lanes); P],
        sums: &mut [[[M::Lanes; P]; R]; T],
    ) {
        let f = const { Q::FORMAT };
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let planes = self.panels.map(|panel| panel.add(f.codes_offset()));
            let unpacked = if T > 1 { Some(unpack::<M, Q, P>(planes)) } else { None };
            let mut scales = *scales;
            for (scale, panel) in scales.iter_mut().zip(self.panels) {
                *scale = group_scale(&f, panel.add(HALF % 2 * f.group_bytes()), *scale);
            }
            for (t, sums) in sums.iter_mut().enumerate() {
                let x = self.x.add(t * R * self.stride);
                let x = std::array::from_fn::<_, R, _>(|r| &*x.add(r * self.stride));
                let mut products = self.start::<M, Q, R, HALF>(x);
                macro_rules! steps {
                    ($($step:literal)*) => {$(
                        let codes = match unpacked {
                            Some(unpacked) => unpacked[$step],
                            None => codes_of::<M, Q, P, $step>(planes),
                        };
                        step::<M, Q, R, P, $step>(&mut products, codes, x);
                    )*};
                }
                if HALF != 1 {
                    steps!(0 1 2 3);
                }
                if HALF != 0 {
                    steps!(4 5 6 7);
                }
                add_scaled::<M, Q, R, P, HALF>(products, x, &scales, sums);
            }
        }
    }

    /// The sums before the first product.
    #[inline(always)]
    unsafe fn start<M: IntegerProduct, Q: Quant, const R: usize, const HALF: usize>(
        &self,
        x: [&Rounded; R],
    ) -> [[M::Sums; P]; R] {
        let f = const { Q::FORMAT };
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let mut products = [[M::start(0); P]; R];
            for r in 0..R {
                products[r] = [M::start(x[r].offsets[HALF] * (f.zero - M::BIAS)); P];
                if f.zeros {
                    for (product, header) in products[r].iter_mut().zip(self.headers) {
                        let zeros = header.add(f.zeros_offset());
                        *product = M::start_each(zeros, x[r].offsets[HALF]);
                    }
                }
            }
            products
        }
    }
}

/// The codes of all steps of a block.
#[inline(always)]
unsafe fn unpack<M: IntegerProduct, Q: Quant, const P: usize>(
    planes: [*const u8; P],
) -> [[M::Codes; P]; BLOCK / 4] {
    // SAFETY: the caller's contract is passed on.
    unsafe {
        [
            codes_of::<M, Q, P, 0>(planes),
            codes_of::<M, Q, P, 1>(planes),
            codes_of::<M, Q, P, 2>(planes),
            codes_of::<M, Q, P, 3>(planes),
            codes_of::<M, Q, P, 4>(planes),
            codes_of::<M, Q, P, 5>(planes),
            codes_of::<M, Q, P, 6>(planes),
            codes_of::<M, Q, P, 7>(planes),
        ]
    }
}

#[inline(always)]
unsafe fn codes_of<M: IntegerProduct, Q: Quant, const P: usize, const STEP: usize>(
    planes: [*const u8; P],
) -> [M::Codes; P] {
    // SAFETY: the caller's contract is passed on.
    unsafe {
        // A loop instead of `map`: the closure would not be compiled with the instructions that the
        // function enables, so each of them would become a call.
        let mut codes = [M::codes::<Q, STEP>(planes[0]); P];
        for p in 1..P {
            codes[p] = M::codes::<Q, STEP>(planes[p]);
        }
        codes
    }
}

#[inline(always)]
unsafe fn step<M: IntegerProduct, Q: Quant, const R: usize, const P: usize, const STEP: usize>(
    products: &mut [[M::Sums; P]; R],
    codes: [M::Codes; P],
    x: [&Rounded; R],
) {
    for (products, x) in products.iter_mut().zip(x) {
        for (product, codes) in products.iter_mut().zip(codes) {
            // SAFETY: the caller's contract is passed on.
            *product = unsafe { M::dot::<Q, STEP>(*product, codes, x) };
        }
    }
}

/// Adds products times the scales of the activations and of the weights, and the minimums.
#[inline(always)]
unsafe fn add_scaled<
    M: IntegerProduct,
    Q: Quant,
    const R: usize,
    const P: usize,
    const HALF: usize,
>(
    products: [[M::Sums; P]; R],
    x: [&Rounded; R],
    scales: &[(M::Lanes, M::Lanes); P],
    sums: &mut [[M::Lanes; P]; R],
) {
    for p in 0..P {
        let (scale, min) = scales[p];
        for r in 0..R {
            // SAFETY: the caller's contract is passed on.
            let product = unsafe { M::finish(products[r][p]) }.mul(M::Lanes::splat(x[r].scale));
            sums[r][p] = product.mul_add(scale, sums[r][p]);
            if const { Q::FORMAT.min } {
                sums[r][p] = min.mul_add(M::Lanes::splat(x[r].sums[HALF]), sums[r][p]);
            }
        }
    }
}

/// The scale and the minimum of a super-block.
#[inline(always)]
unsafe fn header_scale<L: Lanes>(f: &Format, header: *const u8) -> (L, L) {
    // SAFETY: `format` says what lies where.
    unsafe {
        let d = match f.header {
            HeaderScale::F16 => L::load_f16(&*header.cast()),
            HeaderScale::Bf16 => L::load_bf16(&*header.cast()),
            HeaderScale::F32 => L::load(&*header.cast()),
        };
        let d = d.mul(L::splat(f.unit));
        (d, if f.min { L::load_f16(&*header.add(2 * LANES).cast()) } else { d })
    }
}

/// The scale and the minimum of a group.
#[inline(always)]
unsafe fn group_scale<L: Lanes>(f: &Format, group: *const u8, (d, m): (L, L)) -> (L, L) {
    // SAFETY: `format` says what lies where.
    unsafe {
        let bytes: &[u8; LANES] = &*group.cast();
        match f.scales {
            Scales::Direct => (d, m),
            Scales::Bytes if f.min => {
                (d.mul(L::load_i8(bytes)), m.mul(L::load_i8(&*group.add(LANES).cast())))
            }
            Scales::Bytes => (d.mul(L::load_i8(bytes)), m),
            Scales::Nibbles => (
                d.mul(L::load_i8(&bytes.map(|b| b & 15))),
                m.mul(L::load_i8(&bytes.map(|b| b >> 4))),
            ),
        }
    }
}

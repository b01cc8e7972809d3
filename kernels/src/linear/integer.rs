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
//! - The codes of many rows are unpacked once, in pieces of 256 columns. Eight panels take a piece
//!   by turns with all rows, so that its codes stay in the first level of the cache, its
//!   activations and the sums in the second. Predicted by a loop over the same data: 1.06 times as
//!   fast. Measured in two threads on a Zen 5, 512 rows of that model: 1.16 (eight bits 1.08, AVX2
//!   1.10, AVX-VNNI 1.08). For fewer than `MANY_ROWS` it is slower (0.9 for 32 rows by AVX-512),
//!   since memory is not read while rows are multiplied.
//! - Activations rounded by the machine's own instructions: from 7 % of the time of 16 rows to 1.
//!   Measured: 0.8 % of a token's time, was 2.8.

use super::format::{BLOCK, Format, HeaderScale, Quant, Scales, with_format};
use super::rounding::Rounded;
use super::tile::{DenseLanes, PANELS, PanelOperands};
use crate::linear::WeightType;
use crate::simd::{LANES, Lanes};
use std::mem::MaybeUninit;
use std::ops::Range;

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
    /// From this many rows on, codes are unpacked once for all of them and kept in memory.
    const MANY_ROWS: usize;
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
    unsafe fn multiply<Q: Quant, const R: usize, const P: usize>(operands: &QuantisedOperands);
    /// [`multiply_piece`] compiled for this instruction set.
    unsafe fn multiply_piece<Q: Quant, const R: usize, const P: usize>(
        operands: &QuantisedOperands,
        blocks: Range<usize>,
        rows: usize,
    );
    /// [`round_all`] compiled for this instruction set.
    unsafe fn round_all(x: &[f32], out: &mut [Rounded]);
}

/// The entry points that compile [`multiply`], [`multiply_piece`] and [`round_all`] for an
/// instruction set.
macro_rules! entry_points {
    ($($feature:literal)?) => {
        $(#[target_feature(enable = $feature)])?
        unsafe fn round_all(x: &[f32], out: &mut [Rounded]) {
            round_all::<Self>(x, out);
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn multiply<Q: Quant, const R: usize, const P: usize>(
            operands: &QuantisedOperands,
        ) {
            // SAFETY: the caller's contract is passed on.
            unsafe { multiply::<Self, Q, R, P>(operands) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn multiply_piece<Q: Quant, const R: usize, const P: usize>(
            operands: &QuantisedOperands,
            blocks: std::ops::Range<usize>,
            rows: usize,
        ) {
            // SAFETY: the caller's contract is passed on.
            unsafe { multiply_piece::<Self, Q, R, P>(operands, blocks, rows) }
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
        let most = M::TILE.0.min(rows - row);
        let height = [4, 2, 1].into_iter().find(|height| *height <= most).unwrap_or(1);
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
            (1, 1) => tile::<M, Q, 1, 1>(o),
            (1, 2) => tile::<M, Q, 1, 2>(o),
            (2, 1) => tile::<M, Q, 2, 1>(o),
            (2, 2) => tile::<M, Q, 2, 2>(o),
            (4, 1) => tile::<M, Q, 4, 1>(o),
            (4, 2) => tile::<M, Q, 4, 2>(o),
            _ => unreachable!("no register tile of {rows} rows and {panels} panels"),
        }
    }
}

/// [`multiply`] for a tile that the instruction set uses. The others are left out here, because
/// they would be most of what the compiler has to write.
unsafe fn tile<M: IntegerProduct, Q: Quant, const R: usize, const P: usize>(o: &QuantisedOperands) {
    if const { R <= M::TILE.0 && P <= M::TILE.1 } {
        // SAFETY: the caller's contract is passed on.
        unsafe { M::multiply::<Q, R, P>(o) }
    } else {
        unreachable!("a register tile of {R} rows and {P} panels is too large")
    }
}

/// Blocks of a piece: 256 columns, so that the codes of two panels stay in the first level of the
/// cache when they are unpacked, and the activations of some hundred rows in the second. The
/// columns of every super-block divide it.
pub(super) const PIECE: usize = 8;

/// Adds the products of a piece of the columns to the sums of `rows` token rows and up to `PANELS`
/// panels, `[panels / TILE.1][rows][TILE.1][16]`, which the first piece sets.
///
/// # Safety
/// The operands cover all of them, rows up to a multiple of the tile's included, and whole pairs
/// of panels in the sums; the panels are packed as `dtype`, and the machine has `M`'s instructions.
pub(super) unsafe fn add_piece<M: IntegerProduct>(
    dtype: WeightType,
    whole: &QuantisedOperands,
    blocks: Range<usize>,
    rows: usize,
    panels: usize,
) {
    let width = M::TILE.1;
    let rows = rows.next_multiple_of(M::TILE.0);
    for panel in (0..panels).step_by(width) {
        // SAFETY: stays within the operands. A last panel without a neighbour is taken twice.
        unsafe {
            let part = PanelOperands {
                panel_bytes: if panel + width > panels { 0 } else { whole.panel_bytes },
                panel: whole.panel.add(panel * whole.panel_bytes),
                out: whole.out.add(panel * rows * LANES),
                ..*whole
            };
            with_format!(dtype, Q => match M::TILE {
                (1, 1) => piece::<M, Q, 1, 1>(&part, blocks.clone(), rows),
                (2, 1) => piece::<M, Q, 2, 1>(&part, blocks.clone(), rows),
                (4, 1) => piece::<M, Q, 4, 1>(&part, blocks.clone(), rows),
                (4, 2) => piece::<M, Q, 4, 2>(&part, blocks.clone(), rows),
                (6, 2) => piece::<M, Q, 6, 2>(&part, blocks.clone(), rows),
                (rows, panels) => unreachable!("no tile of {rows} rows and {panels} panels"),
            });
        }
    }
}

unsafe fn piece<M: IntegerProduct, Q: Quant, const R: usize, const P: usize>(
    o: &QuantisedOperands,
    blocks: Range<usize>,
    rows: usize,
) {
    if const { R == M::TILE.0 && P == M::TILE.1 } {
        // SAFETY: the caller's contract is passed on.
        unsafe { M::multiply_piece::<Q, R, P>(o, blocks, rows) }
    }
}

#[inline(always)]
pub(super) unsafe fn multiply<M: IntegerProduct, Q: Quant, const R: usize, const P: usize>(
    o: &QuantisedOperands,
) {
    let f = const { Q::FORMAT };
    let per_super = f.super_cols / BLOCK;
    // SAFETY: the operands cover R rows and P panels.
    unsafe {
        let mut sums = [[M::Lanes::splat(0.0); P]; R];
        for index in 0..o.depth / per_super {
            let headers = o.headers::<Q, P>(index);
            let scales = header_scales::<M, Q, P>(headers);
            for i in 0..per_super {
                let panels = block_of::<Q, P>(headers, i);
                if o.ahead > 0 {
                    prefetch::<M, Q, P>(panels, o.ahead);
                }
                let x = o.x.add(index * per_super + i);
                let block = PanelBlock { headers, x, stride: o.depth };
                let weights = BlockWeights::Packed { panels, scales };
                block.add_all::<M, Q, R>(&weights, &mut sums);
            }
        }
        o.store(sums);
    }
}

/// Adds the products of some blocks of `P` panels to sums, `[rows][P][16]`; `rows` is a multiple of
/// `R`.
#[inline(always)]
pub(super) unsafe fn multiply_piece<M: IntegerProduct, Q: Quant, const R: usize, const P: usize>(
    o: &QuantisedOperands,
    blocks: Range<usize>,
    rows: usize,
) {
    let per_super = const { Q::FORMAT.super_cols / BLOCK };
    let mut unpacked = [const { MaybeUninit::<UnpackedBlock<M, P>>::uninit() }; PIECE];
    let mut headers = [[std::ptr::null(); P]; PIECE];
    // SAFETY: the operands cover the rows and P panels.
    unsafe {
        for (i, index) in blocks.clone().enumerate() {
            headers[i] = o.headers::<Q, P>(index / per_super);
            unpack::<M, Q, P>(headers[i], index % per_super, unpacked[i].as_mut_ptr());
        }
        for row in (0..rows).step_by(R) {
            if row + R == rows {
                for (headers, index) in headers.into_iter().zip(blocks.clone()) {
                    prefetch::<M, Q, P>(block_of::<Q, P>(headers, index % per_super), o.ahead);
                }
            }
            let part = PanelOperands { out: o.out.add(row * P * LANES), ..*o };
            let mut sums = [[M::Lanes::splat(0.0); P]; R];
            if blocks.start > 0 {
                sums = part.load();
            }
            for (i, index) in blocks.clone().enumerate() {
                let x = o.x.add(row * o.depth + index);
                let block = PanelBlock { headers: headers[i], x, stride: o.depth };
                let weights = BlockWeights::Unpacked(unpacked[i].assume_init_ref());
                block.add_all::<M, Q, R>(&weights, &mut sums);
            }
            part.store(sums);
        }
    }
}

impl QuantisedOperands {
    /// The headers of a super-block.
    #[inline(always)]
    unsafe fn headers<Q: Quant, const P: usize>(&self, index: usize) -> [*const u8; P] {
        let f = const { Q::FORMAT };
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let mut headers = [self.panel.add(index * f.super_bytes()); P];
            for p in 1..P {
                headers[p] = headers[0].add(p * self.panel_bytes);
            }
            headers
        }
    }
}

/// A block of the super-block that has these headers.
#[inline(always)]
unsafe fn block_of<Q: Quant, const P: usize>(
    headers: [*const u8; P],
    index: usize,
) -> [*const u8; P] {
    let f = const { Q::FORMAT };
    // SAFETY: the caller's contract is passed on.
    headers.map(|header| unsafe { header.add(f.header_bytes() + index * f.block_bytes()) })
}

/// Prefetches the blocks that lie `ahead` bytes further on.
#[inline(always)]
fn prefetch<M: IntegerProduct, Q: Quant, const P: usize>(blocks: [*const u8; P], ahead: usize) {
    for block in blocks {
        for line in (0..Q::FORMAT.block_bytes()).step_by(CACHE_LINE) {
            M::prefetch(block.wrapping_add(ahead + line));
        }
    }
}

/// The scales and minimums of some panels' super-block.
#[inline(always)]
unsafe fn header_scales<M: IntegerProduct, Q: Quant, const P: usize>(
    headers: [*const u8; P],
) -> [(M::Lanes, M::Lanes); P] {
    // SAFETY: the caller's contract is passed on.
    unsafe {
        let mut scales = [header_scale::<M::Lanes>(&Q::FORMAT, headers[0]); P];
        for p in 1..P {
            scales[p] = header_scale::<M::Lanes>(&Q::FORMAT, headers[p]);
        }
        scales
    }
}

/// The scales and minimums of one half of a block, or of all of it.
#[inline(always)]
unsafe fn group_scales<M: IntegerProduct, Q: Quant, const P: usize, const HALF: usize>(
    blocks: [*const u8; P],
    mut scales: [(M::Lanes, M::Lanes); P],
) -> [(M::Lanes, M::Lanes); P] {
    let f = const { Q::FORMAT };
    // SAFETY: the caller's contract is passed on.
    unsafe {
        for (scale, block) in scales.iter_mut().zip(blocks) {
            let group = if f.group < BLOCK { HALF % 2 } else { 0 };
            *scale = group_scale(&f, block.add(group * f.group_bytes()), *scale);
        }
    }
    scales
}

const CACHE_LINE: usize = 64;

/// The value of `HALF` that stands for the whole block.
const BOTH: usize = 2;

/// A block of some panels.
enum BlockWeights<'a, M: IntegerProduct, const P: usize> {
    /// As they are stored, and the scales and minimums of their super-block.
    Packed {
        panels: [*const u8; P],
        scales: [(M::Lanes, M::Lanes); P],
    },
    Unpacked(&'a UnpackedBlock<M, P>),
}

/// The codes of a block's steps, and the scales and minimums of its groups, which are one or two.
struct UnpackedBlock<M: IntegerProduct, const P: usize> {
    codes: [[M::Codes; P]; BLOCK / 4],
    scales: [[(M::Lanes, M::Lanes); P]; 2],
}

/// The headers of a block of some panels, and the block of the first row's activations; those of
/// further rows are `stride` blocks apart.
struct PanelBlock<const P: usize> {
    headers: [*const u8; P],
    x: *const Rounded,
    stride: usize,
}

impl<const P: usize> PanelBlock<P> {
    /// Adds the products of the block.
    #[inline(always)]
    unsafe fn add_all<M: IntegerProduct, Q: Quant, const R: usize>(
        &self,
        weights: &BlockWeights<M, P>,
        sums: &mut [[M::Lanes; P]; R],
    ) {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            if const { Q::FORMAT.group == BLOCK } {
                self.add::<M, Q, R, BOTH>(weights, sums);
            } else {
                self.add::<M, Q, R, 0>(weights, sums);
                self.add::<M, Q, R, 1>(weights, sums);
            }
        }
    }

    /// Adds the products of one half of the block, or of both.
    #[inline(always)]
    unsafe fn add<M: IntegerProduct, Q: Quant, const R: usize, const HALF: usize>(
        &self,
        weights: &BlockWeights<M, P>,
        sums: &mut [[M::Lanes; P]; R],
    ) {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let scales = match *weights {
                BlockWeights::Packed { panels, scales } => {
                    group_scales::<M, Q, P, HALF>(panels, scales)
                }
                BlockWeights::Unpacked(block) => block.scales[HALF % 2],
            };
            let x = std::array::from_fn::<_, R, _>(|r| &*self.x.add(r * self.stride));
            let mut products = self.start::<M, Q, R, HALF>(x);
            macro_rules! steps {
                ($($step:literal)*) => {$(
                    let codes = match *weights {
                        BlockWeights::Packed { panels, .. } => codes_of::<M, Q, P, $step>(panels),
                        BlockWeights::Unpacked(block) => block.codes[$step],
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

/// Unpacks a block of the super-block that has these headers.
#[inline(always)]
unsafe fn unpack<M: IntegerProduct, Q: Quant, const P: usize>(
    headers: [*const u8; P],
    index: usize,
    to: *mut UnpackedBlock<M, P>,
) {
    macro_rules! steps {
        ($panels:ident: $($step:literal)*) => {$(
            (&raw mut (*to).codes[$step]).write(codes_of::<M, Q, P, $step>($panels));
        )*};
    }
    // SAFETY: the caller's contract is passed on.
    unsafe {
        let panels = block_of::<Q, P>(headers, index);
        steps!(panels: 0 1 2 3 4 5 6 7);
        let scales = header_scales::<M, Q, P>(headers);
        (&raw mut (*to).scales[0]).write(group_scales::<M, Q, P, 0>(panels, scales));
        (&raw mut (*to).scales[1]).write(group_scales::<M, Q, P, 1>(panels, scales));
    }
}

/// The codes of a step of a block of some panels.
#[inline(always)]
unsafe fn codes_of<M: IntegerProduct, Q: Quant, const P: usize, const STEP: usize>(
    panels: [*const u8; P],
) -> [M::Codes; P] {
    let offset = const { Q::FORMAT.codes_offset() };
    // SAFETY: the caller's contract is passed on.
    unsafe {
        // A loop instead of `map`: the closure would not be compiled with the instructions that the
        // function enables, so each of them would become a call.
        let mut codes = [M::codes::<Q, STEP>(panels[0].add(offset)); P];
        for p in 1..P {
            codes[p] = M::codes::<Q, STEP>(panels[p].add(offset));
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

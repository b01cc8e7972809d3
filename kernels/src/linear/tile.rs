//! The product with dense weights in f32: a register tile of token rows by outputs, summed along
//! the columns in order. Each sum is one chain of fused multiply-adds from column 0 upwards,
//! whatever the tile's size is, so results do not depend on tile shapes.

use super::pack::SCALE_BYTES;
use crate::linear::WeightType;
use crate::simd::{E4M3_UNIT, LANES, Lanes};
use std::ops::Range;

/// The most panels, and the most token rows, of a tile: 12 by 2 sums take the 24 of 32 registers of
/// AVX-512 that `DenseLanes` allows for them.
pub(super) const PANELS: usize = 2;
pub(super) const ROWS: usize = 12;

/// An element type of dense panels, `[cols][16]`.
pub(super) trait DenseElement {
    const BYTES: usize;
    /// Columns of a group, before which its scales stand as sixteen f32; `None`: there are none.
    const GROUP: Option<usize> = None;
    /// A factor of the scales: a power of two.
    const UNIT: f32 = 1.0;
    /// # Safety
    /// `at` is valid for sixteen elements.
    unsafe fn load<L: Lanes>(at: *const u8) -> L;
}

macro_rules! elements {
    ($($name:ident: $bytes:literal, $load:ident;)*) => {$(
        pub(super) struct $name;
        impl DenseElement for $name {
            const BYTES: usize = $bytes;
            #[inline(always)]
            unsafe fn load<L: Lanes>(at: *const u8) -> L {
                // SAFETY: the caller's contract.
                unsafe { L::$load(&*at.cast()) }
            }
        }
    )*};
}

elements! {
    F32: 4, load;
    F16: 2, load_f16;
    BF16: 2, load_bf16;
}

/// Floats of eight bits, each `GROUP` columns with a scale.
pub(super) struct E4M3<const GROUP: usize>;
pub(super) struct E5M2<const GROUP: usize>;

impl<const GROUP: usize> DenseElement for E4M3<GROUP> {
    const BYTES: usize = 1;
    const GROUP: Option<usize> = Some(GROUP);
    const UNIT: f32 = E4M3_UNIT;
    #[inline(always)]
    unsafe fn load<L: Lanes>(at: *const u8) -> L {
        // SAFETY: the caller's contract.
        unsafe { L::load_e4m3(&*at.cast()) }
    }
}

impl<const GROUP: usize> DenseElement for E5M2<GROUP> {
    const BYTES: usize = 1;
    const GROUP: Option<usize> = Some(GROUP);
    #[inline(always)]
    unsafe fn load<L: Lanes>(at: *const u8) -> L {
        // SAFETY: the caller's contract.
        unsafe { L::load_e5m2(&*at.cast()) }
    }
}

/// An instruction set's dense product.
pub(super) trait DenseLanes: Lanes {
    /// Token rows that are multiplied together.
    const ROWS: usize;
    /// The number of sums that are kept in registers.
    const ACCUMULATORS: usize;
    /// [`multiply`] compiled for this instruction set.
    unsafe fn multiply<E: DenseElement, const R: usize, const P: usize>(
        operands: &PanelOperands<f32>,
    );
}

macro_rules! dense {
    ($machine:ident: $rows:literal, $accumulators:literal $(, $feature:literal)?) => {
        impl DenseLanes for crate::simd::$machine {
            const ROWS: usize = $rows;
            const ACCUMULATORS: usize = $accumulators;
            $(#[target_feature(enable = $feature)])?
            unsafe fn multiply<E: DenseElement, const R: usize, const P: usize>(
                operands: &PanelOperands<f32>,
            ) {
                // SAFETY: the caller's contract is passed on.
                unsafe { multiply::<Self, E, R, P>(operands) }
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
dense!(Avx512: 12, 24, "avx512f");
#[cfg(target_arch = "x86_64")]
dense!(Avx2: 4, 4, "avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
dense!(Neon: 4, 4);
dense!(Portable: 4, 4);

/// The operands of the product of some token rows and panels. `X` is f32, or a block of rounded
/// activations.
pub(super) struct PanelOperands<X> {
    /// Columns, or blocks of them.
    pub depth: usize,
    /// f32: `[depth][x_stride]`, the values of the tile's rows side by side. Blocks:
    /// `[rows][depth]`.
    pub x: *const X,
    pub x_stride: usize,
    /// The first panel; panels are `panel_bytes` apart.
    pub panel: *const u8,
    pub panel_bytes: usize,
    /// The tile's first output, which is written; rows are `stride` apart.
    pub out: *mut f32,
    pub stride: usize,
    /// While the last rows are computed, the weights this many bytes further on are fetched into
    /// the cache; 0: none are.
    pub ahead: usize,
}

impl<X> PanelOperands<X> {
    /// The operands of a part: `x` further on in the activations, some rows and panels further on
    /// in the output.
    ///
    /// # Safety
    /// The part lies inside the whole.
    pub(super) unsafe fn part(&self, x: usize, row: usize, panel: usize) -> Self {
        // SAFETY: the caller's contract.
        unsafe {
            Self {
                x: self.x.add(x),
                panel: self.panel.add(panel * self.panel_bytes),
                out: self.out.add(row * self.stride + panel * LANES),
                ..*self
            }
        }
    }

    /// A tile of sums that were stored.
    ///
    /// # Safety
    /// The output has the tile.
    #[inline(always)]
    pub(super) unsafe fn load<L: Lanes, const R: usize, const P: usize>(&self) -> [[L; P]; R] {
        let mut sums = [[L::splat(0.0); P]; R];
        for (r, row) in sums.iter_mut().enumerate() {
            for (p, sum) in row.iter_mut().enumerate() {
                // SAFETY: the caller's contract.
                *sum = L::load(unsafe { &*self.out.add(r * self.stride + p * LANES).cast() });
            }
        }
        sums
    }

    /// Stores a tile of sums.
    ///
    /// # Safety
    /// The output has room for the tile.
    #[inline(always)]
    pub(super) unsafe fn store<L: Lanes, const R: usize, const P: usize>(&self, sums: [[L; P]; R]) {
        for (r, row) in sums.into_iter().enumerate() {
            for (p, sum) in row.into_iter().enumerate() {
                // SAFETY: the caller's contract.
                sum.store(unsafe { &mut *self.out.add(r * self.stride + p * LANES).cast() });
            }
        }
    }
}

/// Sets the outputs of `rows` token rows and up to `PANELS` panels, in register tiles.
///
/// # Safety
/// The operands' pointers cover the tile and whole panels of outputs, `rows` is one of 1, 2, 4, 8,
/// 12, and the machine has `L`'s instructions.
pub(super) unsafe fn multiply_all<L: DenseLanes>(
    dtype: WeightType,
    whole: &PanelOperands<f32>,
    rows: usize,
    panels: usize,
) {
    let height = rows.min(L::ROWS);
    let width = (L::ACCUMULATORS / height).clamp(1, PANELS);
    for row in (0..rows).step_by(height) {
        for panel in (0..panels).step_by(width) {
            // SAFETY: stays within the operands.
            unsafe {
                let part = whole.part(row, row, panel);
                let (rows, panels) = (height.min(rows - row), width.min(panels - panel));
                match dtype {
                    WeightType::F32 => dispatch::<L, F32>(&part, rows, panels),
                    WeightType::F16 => dispatch::<L, F16>(&part, rows, panels),
                    WeightType::E4M3By32 => dispatch::<L, E4M3<32>>(&part, rows, panels),
                    WeightType::E4M3By128 => dispatch::<L, E4M3<128>>(&part, rows, panels),
                    WeightType::E5M2By32 => dispatch::<L, E5M2<32>>(&part, rows, panels),
                    _ => dispatch::<L, BF16>(&part, rows, panels),
                }
            }
        }
    }
}

unsafe fn dispatch<L: DenseLanes, E: DenseElement>(
    o: &PanelOperands<f32>,
    rows: usize,
    panels: usize,
) {
    // SAFETY: the caller's contract is passed on.
    unsafe {
        match (rows, panels) {
            (1, 1) => tile::<L, E, 1, 1>(o),
            (1, 2) => tile::<L, E, 1, 2>(o),
            (2, 1) => tile::<L, E, 2, 1>(o),
            (2, 2) => tile::<L, E, 2, 2>(o),
            (4, 1) => tile::<L, E, 4, 1>(o),
            (4, 2) => tile::<L, E, 4, 2>(o),
            (8, 1) => tile::<L, E, 8, 1>(o),
            (8, 2) => tile::<L, E, 8, 2>(o),
            (12, 1) => tile::<L, E, 12, 1>(o),
            (12, 2) => tile::<L, E, 12, 2>(o),
            _ => unreachable!("no register tile of {rows} rows and {panels} panels"),
        }
    }
}

/// [`multiply`] for a tile that the instruction set uses; the others are left out.
unsafe fn tile<L: DenseLanes, E: DenseElement, const R: usize, const P: usize>(
    o: &PanelOperands<f32>,
) {
    if const { R <= L::ROWS && R * P <= L::ACCUMULATORS } {
        // SAFETY: the caller's contract is passed on.
        unsafe { L::multiply::<E, R, P>(o) }
    } else {
        unreachable!("a register tile of {R} rows and {P} panels is too large")
    }
}

#[inline(always)]
unsafe fn multiply<L: Lanes, E: DenseElement, const R: usize, const P: usize>(
    o: &PanelOperands<f32>,
) {
    // SAFETY: the operands cover R rows and P panels.
    unsafe {
        let mut sums = [[L::splat(0.0); P]; R];
        match E::GROUP {
            None => columns::<L, E, R, P>(o, 0, 0..o.depth, &mut sums),
            Some(width) => {
                for first in (0..o.depth).step_by(width) {
                    group::<L, E, R, P>(o, first..first + width, &mut sums);
                }
            }
        }
        o.store(sums);
    }
}

/// Adds the products of a group of columns, which have a scale: their own chain times it.
#[inline(always)]
unsafe fn group<L: Lanes, E: DenseElement, const R: usize, const P: usize>(
    o: &PanelOperands<f32>,
    of: Range<usize>,
    sums: &mut [[L; P]; R],
) {
    let at = of.start / of.len() * LANES * (SCALE_BYTES + of.len() * E::BYTES);
    let mut products = [[L::splat(0.0); P]; R];
    // SAFETY: the caller's contract is passed on; a group begins with its scales.
    unsafe {
        columns::<L, E, R, P>(o, at + LANES * SCALE_BYTES, of, &mut products);
        for p in 0..P {
            let scale = L::load(&*o.panel.add(p * o.panel_bytes + at).cast());
            let scale = scale.mul(L::splat(E::UNIT));
            for r in 0..R {
                sums[r][p] = products[r][p].mul_add(scale, sums[r][p]);
            }
        }
    }
}

/// Adds the products of some columns, whose weights begin at byte `at` of each panel.
#[inline(always)]
unsafe fn columns<L: Lanes, E: DenseElement, const R: usize, const P: usize>(
    o: &PanelOperands<f32>,
    at: usize,
    of: Range<usize>,
    sums: &mut [[L; P]; R],
) {
    for (i, k) in of.enumerate() {
        // SAFETY: the operands cover R rows, P panels and these columns.
        unsafe {
            let w: [L; P] = std::array::from_fn(|p| {
                E::load(o.panel.add(p * o.panel_bytes + at + i * LANES * E::BYTES))
            });
            for (r, row) in sums.iter_mut().enumerate() {
                let x = L::splat(*o.x.add(k * o.x_stride + r));
                for (sum, w) in row.iter_mut().zip(w) {
                    *sum = x.mul_add(w, *sum);
                }
            }
        }
    }
}

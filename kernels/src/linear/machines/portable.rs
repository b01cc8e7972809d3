//! The integer products in plain integers, for any machine.

use crate::linear::format::{BLOCK, Format, Quant};
use crate::linear::integer::{
    IntegerProduct, QuantisedOperands, entry_points, multiply, multiply_piece, round_all,
};
use crate::linear::rounding::{Rounded, limit};
use crate::simd::{LANES, Portable};
use std::array::from_fn;

pub(in crate::linear) struct Plain;

impl IntegerProduct for Plain {
    type Lanes = Portable;
    type Codes = [[u8; 4]; LANES];
    type Sums = [i32; LANES];
    const TILE: (usize, usize) = (2, 1);
    const MANY_ROWS: usize = 32;

    #[inline(always)]
    fn round(x: &[f32; BLOCK]) -> Rounded {
        Rounded::plain(x, limit(2), |codes| from_fn(|i| codes[i / 2].to_le_bytes()[i % 2]))
    }

    #[inline(always)]
    unsafe fn start(offset: i32) -> Self::Sums {
        [offset; LANES]
    }

    #[inline(always)]
    unsafe fn start_each(zeros: *const u8, offset: i32) -> Self::Sums {
        // SAFETY: the caller's contract.
        let zeros = unsafe { zeros.cast::<[u8; LANES]>().read() };
        zeros.map(|zero| i32::from(zero) * offset)
    }

    #[inline(always)]
    unsafe fn codes<Q: Quant, const STEP: usize>(planes: *const u8) -> Self::Codes {
        // SAFETY: the caller's contract is passed on.
        unsafe { codes(&const { Q::FORMAT }, planes, STEP) }
    }

    #[inline(always)]
    unsafe fn dot<Q: Quant, const STEP: usize>(
        sums: Self::Sums,
        codes: Self::Codes,
        x: &Rounded,
    ) -> Self::Sums {
        dot(sums, &codes, &x.codes[8 * STEP..][..8])
    }

    #[inline(always)]
    unsafe fn finish(sums: Self::Sums) -> Portable {
        Portable(sums.map(|sum| sum as f32))
    }

    entry_points!();
}

/// The codes of a step of a block. One function serves all formats, and `dot` all steps: written
/// out for each, they would be seven megabytes of the program, which few machines need.
#[inline(never)]
unsafe fn codes(f: &Format, planes: *const u8, step: usize) -> [[u8; 4]; LANES] {
    // SAFETY: the planes hold 32 columns.
    let mut codes = unsafe { field(planes, f.low, step) };
    if f.high > 0 {
        // SAFETY: the planes hold 32 columns.
        let high = unsafe { field(planes.add(4 * LANES * f.low), f.high, step) };
        codes = from_fn(|i| from_fn(|j| codes[i][j] | high[i][j] << f.low));
    }
    let Some(table) = f.table else { return codes };
    codes.map(|bytes| bytes.map(|code| table[usize::from(code)]))
}

/// The fields of `bits` bits of a step's columns.
#[inline(always)]
unsafe fn field(plane: *const u8, bits: usize, step: usize) -> [[u8; 4]; LANES] {
    let per_byte = 8 / bits;
    // SAFETY: a plane has BLOCK columns.
    let word = unsafe { plane.add(step / per_byte * 4 * LANES).cast::<[[u8; 4]; LANES]>().read() };
    word.map(|bytes| bytes.map(|byte| byte >> (step % per_byte * bits) & (u8::MAX >> (8 - bits))))
}

/// Adds the products of a step's codes and activations, which are four little-endian words.
#[inline(never)]
fn dot(sums: [i32; LANES], codes: &[[u8; 4]; LANES], x: &[u8]) -> [i32; LANES] {
    let x: [i32; 4] = from_fn(|j| i32::from(i16::from_le_bytes([x[2 * j], x[2 * j + 1]])));
    from_fn(|i| codes[i].iter().zip(x).fold(sums[i], |sum, (code, x)| sum + i32::from(*code) * x))
}

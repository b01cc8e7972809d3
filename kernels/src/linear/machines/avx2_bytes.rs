//! AVX2: products of unsigned by signed bytes, four columns of eight outputs in one instruction,
//! for codes of at most seven bits. Sums of two products fit sixteen bits then, and several of them
//! are added in sixteen bits before they are widened: all of a block for codes of four bits.
//!
//! Predicted for a block of a row and a panel of four-bit codes: 118 instructions, 32 of them to
//! unpack, where words had taken 148, 1.25 times as fast for one row; half the products with
//! activations of one byte, 2 times for many rows. Measured beside words as they were, on a Zen 5,
//! in its caches: one row of Q4_K 1.21, Q6_K 1.30, Q4_0 1.23; with one byte, twelve rows
//! 2.07, 2.18 and 2.18.
#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use super::avx2::{add_products, columns, four_bytes, offsets};
use crate::linear::format::{BLOCK, Format, Quant};
use crate::linear::integer::{
    IntegerProduct, QuantisedOperands, entry_points, multiply, multiply_piece, round_all,
};
use crate::linear::rounding::Rounded;
use crate::simd::Avx2;
use std::arch::x86_64::*;

/// Activations of `BYTES` bytes, 1 or 2.
pub(in crate::linear) struct ByteProduct<const BYTES: usize>;

/// Sums of eight outputs.
#[derive(Clone, Copy)]
pub(in crate::linear) struct PairSums<const BYTES: usize> {
    /// Sums in sixteen bits that are not in `whole` yet, those of even and of odd pairs of columns
    /// apart: of products with the activations' low bytes, and with their high bytes.
    pairs: [__m256i; BYTES],
    whole: __m256i,
}

impl<const BYTES: usize> IntegerProduct for ByteProduct<BYTES> {
    type Lanes = Avx2;
    /// For eight outputs each.
    type Codes = [__m256i; 2];
    type Sums = [PairSums<BYTES>; 2];
    /// Eight sums, two vectors of codes and two of products leave four of sixteen registers. Two
    /// bytes are for single rows, since `Words` is faster for more.
    const TILE: (usize, usize) = (if BYTES == 1 { 4 } else { 1 }, 1);
    const MANY_ROWS: usize = if BYTES == 1 { 16 } else { usize::MAX };

    #[inline(always)]
    fn round(x: &[f32; BLOCK]) -> Rounded {
        Rounded::split(x, BYTES)
    }

    #[inline(always)]
    unsafe fn start(offset: i32) -> Self::Sums {
        // SAFETY: the caller enables the features; only registers are touched.
        unsafe {
            [PairSums { pairs: [_mm256_setzero_si256(); BYTES], whole: _mm256_set1_epi32(offset) };
                2]
        }
    }

    #[inline(always)]
    unsafe fn start_each(zeros: *const u8, offset: i32) -> Self::Sums {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let [first, second] = offsets(zeros, offset);
            let pairs = [_mm256_setzero_si256(); BYTES];
            [PairSums { pairs, whole: first }, PairSums { pairs, whole: second }]
        }
    }

    #[inline(always)]
    unsafe fn codes<Q: Quant, const STEP: usize>(planes: *const u8) -> Self::Codes {
        // SAFETY: the caller's contract is passed on.
        unsafe { columns::<Q, STEP>(planes) }
    }

    #[inline(always)]
    unsafe fn dot<Q: Quant, const STEP: usize>(
        mut sums: Self::Sums,
        codes: Self::Codes,
        x: &Rounded,
    ) -> Self::Sums {
        let steps = const { steps(&Q::FORMAT) };
        // SAFETY: eight steps of four bytes, twice.
        unsafe {
            for byte in 0..BYTES {
                let pairs = [sums[0].pairs[byte], sums[1].pairs[byte]];
                let pairs = match (STEP % steps, byte) {
                    (0, _) => {
                        let x = four_bytes(x, (1 - byte) * BLOCK + 4 * STEP);
                        [_mm256_maddubs_epi16(codes[0], x), _mm256_maddubs_epi16(codes[1], x)]
                    }
                    (_, 0) => add_products::<false, STEP, 1>(pairs, codes, x),
                    _ => add_products::<false, STEP, 0>(pairs, codes, x),
                };
                (sums[0].pairs[byte], sums[1].pairs[byte]) = (pairs[0], pairs[1]);
            }
            if STEP % steps == steps - 1 {
                for PairSums { pairs, whole } in &mut sums {
                    for (byte, pairs) in pairs.iter().enumerate() {
                        let unit = _mm256_set1_epi16(1 << (8 * byte));
                        *whole = _mm256_add_epi32(*whole, _mm256_madd_epi16(*pairs, unit));
                    }
                }
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn finish([first, second]: Self::Sums) -> Avx2 {
        // SAFETY: the caller enables the features; only registers are touched.
        unsafe { Avx2(_mm256_cvtepi32_ps(first.whole), _mm256_cvtepi32_ps(second.whole)) }
    }

    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: any address may be named.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    entry_points!("avx2,fma,f16c");
}

/// The steps of a group whose sums fit sixteen bits: a power of two.
const fn steps(format: &Format) -> usize {
    // Each adds two products of a code and a signed byte.
    let most = i16::MAX as usize / (2 * 128 * format.largest_code() as usize);
    let in_group = format.group / 4;
    let mut steps = 1;
    while 2 * steps <= most && 2 * steps <= in_group {
        steps *= 2;
    }
    steps
}

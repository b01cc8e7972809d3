//! AVX2 with VNNI: eight outputs' four columns in one instruction, where `avx512` has sixteen.
//!
//! Predicted: as many multiplications as `avx2` has, which leave four of its eight additions and
//! unpack bytes instead of words, 1.25 times as fast for many rows. Measured in two threads on a
//! Zen 5, a model of 1.5 billion weights in Q4_K_M: prefill 1.28 times, 8 streams 1.31, one row
//! 1.1, beside `avx2` when that had tiles of two rows.
//! The same sums in words (`vpdpwssd`) brought nothing.
#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use super::avx2::{columns, four_bytes, offsets};
use crate::linear::format::{BLOCK, Quant};
use crate::linear::integer::{
    IntegerProduct, QuantisedOperands, entry_points, multiply, multiply_piece, round_all,
};
use crate::linear::rounding::Rounded;
use crate::simd::Avx2;
use std::arch::x86_64::*;

/// Activations of `BYTES` bytes, 1 or 2.
pub(in crate::linear) struct HalfVnni<const BYTES: usize>;

impl<const BYTES: usize> IntegerProduct for HalfVnni<BYTES> {
    type Lanes = Avx2;
    /// For eight outputs each.
    type Codes = [__m256i; 2];
    /// The sums of eight outputs each: of products with the activations' high bytes, and with their
    /// low bytes. Where they have one byte, that is the low one.
    type Sums = [(__m256i, __m256i); 2];
    /// Eight chains of products, and the codes and activations of a step, leave four of sixteen
    /// registers.
    const TILE: (usize, usize) = (4 / BYTES, 1);
    const MANY_ROWS: usize = 32;

    /// The high bytes, then the low ones, which are signed.
    #[inline(always)]
    fn round(x: &[f32; BLOCK]) -> Rounded {
        Rounded::split(x, BYTES)
    }

    #[inline(always)]
    unsafe fn start(offset: i32) -> Self::Sums {
        // SAFETY: the caller enables the features; only registers are touched.
        unsafe { [(_mm256_setzero_si256(), _mm256_set1_epi32(offset)); 2] }
    }

    #[inline(always)]
    unsafe fn start_each(zeros: *const u8, offset: i32) -> Self::Sums {
        // SAFETY: the caller enables the features and gives sixteen bytes.
        unsafe { offsets(zeros, offset).map(|offset| (_mm256_setzero_si256(), offset)) }
    }

    #[inline(always)]
    unsafe fn codes<Q: Quant, const STEP: usize>(planes: *const u8) -> Self::Codes {
        // SAFETY: the planes hold 32 columns of sixteen outputs.
        unsafe { columns::<Q, STEP>(planes) }
    }

    #[inline(always)]
    unsafe fn dot<Q: Quant, const STEP: usize>(
        [first, second]: Self::Sums,
        codes: Self::Codes,
        x: &Rounded,
    ) -> Self::Sums {
        // SAFETY: eight steps of four bytes, twice.
        unsafe {
            let low = four_bytes(x, BLOCK + 4 * STEP);
            let first = (first.0, _mm256_dpbusd_avx_epi32(first.1, codes[0], low));
            let second = (second.0, _mm256_dpbusd_avx_epi32(second.1, codes[1], low));
            if BYTES == 1 {
                return [first, second];
            }
            let high = four_bytes(x, 4 * STEP);
            [
                (_mm256_dpbusd_avx_epi32(first.0, codes[0], high), first.1),
                (_mm256_dpbusd_avx_epi32(second.0, codes[1], high), second.1),
            ]
        }
    }

    #[inline(always)]
    unsafe fn finish([first, second]: Self::Sums) -> Avx2 {
        // SAFETY: the caller enables the features; only registers are touched.
        unsafe {
            let sum = |(high, low): (__m256i, __m256i)| {
                let high = _mm256_slli_epi32::<8>(high);
                _mm256_cvtepi32_ps(if BYTES == 1 { low } else { _mm256_add_epi32(high, low) })
            };
            Avx2(sum(first), sum(second))
        }
    }

    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: any address may be named.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    entry_points!("avx2,fma,f16c,avxvnni");
}

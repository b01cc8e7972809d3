//! AVX2 with VNNI: eight outputs' four columns in one instruction, where `avx512` has sixteen.
//!
//! Predicted: as many multiplications as `avx2` has, which leave four of its eight additions and
//! unpack bytes instead of words, 1.25 times as fast for many rows. Measured in two threads on a
//! Zen 5, a model of 1.5 billion weights in Q4_K_M: prefill 1.28 times, 8 streams 1.31, one row
//! 1.1.
//! The same sums in words (`vpdpwssd`) brought nothing.
#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use crate::linear::format::{BLOCK, Quant};
use crate::linear::integer::{
    IntegerProduct, QuantisedOperands, entry_points, multiply, round_all,
};
use crate::linear::rounding::{self, Rounded};
use crate::simd::{Avx2, LANES};
use std::arch::x86_64::*;
use std::array::from_fn;

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

    /// The high bytes, then the low ones, which are signed.
    #[inline(always)]
    fn round(x: &[f32; BLOCK]) -> Rounded {
        Rounded::plain(x, rounding::limit(BYTES), |codes| {
            from_fn(|i| match i.checked_sub(BLOCK) {
                None => ((codes[i] + 128) >> 8) as u8,
                Some(i) => codes[i] as u8,
            })
        })
    }

    #[inline(always)]
    unsafe fn start(offset: i32) -> Self::Sums {
        // SAFETY: the caller enables the features; only registers are touched.
        unsafe { [(_mm256_setzero_si256(), _mm256_set1_epi32(offset)); 2] }
    }

    #[inline(always)]
    unsafe fn start_each(zeros: *const u8, offset: i32) -> Self::Sums {
        // SAFETY: the caller enables the features and gives sixteen bytes.
        unsafe {
            let zeros = _mm_loadu_si128(zeros.cast());
            let offset = _mm256_set1_epi32(offset);
            let start = |zeros| _mm256_mullo_epi32(_mm256_cvtepu8_epi32(zeros), offset);
            [
                (_mm256_setzero_si256(), start(zeros)),
                (_mm256_setzero_si256(), start(_mm_srli_si128::<8>(zeros))),
            ]
        }
    }

    #[inline(always)]
    unsafe fn codes<Q: Quant, const STEP: usize>(planes: *const u8) -> Self::Codes {
        // SAFETY: the planes hold 32 columns of sixteen outputs.
        unsafe { [columns::<Q, STEP>(planes), columns::<Q, STEP>(planes.add(2 * LANES))] }
    }

    #[inline(always)]
    unsafe fn dot<const STEP: usize>(
        [first, second]: Self::Sums,
        codes: Self::Codes,
        x: &Rounded,
    ) -> Self::Sums {
        // SAFETY: eight steps of four bytes, twice.
        unsafe {
            let four = |at: usize| {
                _mm256_set1_epi32(
                    x.codes.as_ptr().add(at + 4 * STEP).cast::<i32>().read_unaligned(),
                )
            };
            let low = four(BLOCK);
            let first = (first.0, _mm256_dpbusd_avx_epi32(first.1, codes[0], low));
            let second = (second.0, _mm256_dpbusd_avx_epi32(second.1, codes[1], low));
            if BYTES == 1 {
                return [first, second];
            }
            let high = four(0);
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

/// The codes of step `STEP`'s columns, for the eight outputs with which `planes` starts.
#[inline(always)]
unsafe fn columns<Q: Quant, const STEP: usize>(planes: *const u8) -> __m256i {
    let f = const { Q::FORMAT };
    // SAFETY: as above.
    unsafe {
        let mut codes = field::<STEP>(planes, f.low, 0);
        if f.high > 0 {
            let high = field::<STEP>(planes.add(4 * LANES * f.low), f.high, f.low);
            codes = _mm256_or_si256(codes, high);
        }
        let Some(table) = f.table else { return codes };
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        _mm256_shuffle_epi8(table, codes)
    }
}

/// The fields of `bits` bits of step `STEP`'s columns, moved up to bit `to` of each byte.
#[inline(always)]
unsafe fn field<const STEP: usize>(plane: *const u8, bits: usize, to: usize) -> __m256i {
    // SAFETY: a plane has BLOCK columns.
    unsafe {
        let per_byte = 8 / bits;
        let word = _mm256_loadu_si256(plane.add(STEP / per_byte * 4 * LANES).cast());
        if bits == 8 {
            return word;
        }
        let from = STEP % per_byte * bits;
        let moved = if to > from {
            _mm256_sllv_epi32(word, _mm256_set1_epi32((to - from) as i32))
        } else {
            _mm256_srlv_epi32(word, _mm256_set1_epi32((from - to) as i32))
        };
        _mm256_and_si256(moved, _mm256_set1_epi8((((1u32 << bits) - 1) << to) as u8 as i8))
    }
}

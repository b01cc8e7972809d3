//! AVX-512 with VNNI: sixteen outputs' four columns in one instruction, of unsigned by signed
//! bytes. The two bytes of an activation are multiplied apart and put together once per group.
#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use crate::linear::format::{BLOCK, Quant};
use crate::linear::integer::{
    IntegerProduct, QuantisedOperands, entry_points, multiply, multiply_piece, round_all,
};
use crate::linear::rounding::{self, Rounded};
use crate::simd::{Avx512, LANES};
use std::arch::x86_64::*;

/// Activations of `BYTES` bytes, 1 or 2.
pub(in crate::linear) struct Vnni<const BYTES: usize>;

impl<const BYTES: usize> IntegerProduct for Vnni<BYTES> {
    type Lanes = Avx512;
    type Codes = __m512i;
    /// The sums of products with the activations' high bytes, and with their low bytes. Where they
    /// have one byte, that is the low one.
    type Sums = (__m512i, __m512i);
    /// Sixteen chains of products and eight sums, or twelve and twelve, leave eight registers.
    const TILE: (usize, usize) = if BYTES == 1 { (6, 2) } else { (4, 2) };
    const MANY_ROWS: usize = 96 * 2 / BYTES;

    /// The high bytes, then the low ones, which are signed.
    #[inline(always)]
    fn round(x: &[f32; BLOCK]) -> Rounded {
        // SAFETY: half a block is sixteen values, or sixteen bytes of codes.
        unsafe {
            let (first, second) =
                (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(LANES)));
            // Without the sign bit, magnitudes compare as integers, and NaN is above all.
            let bits =
                |half| _mm512_and_si512(_mm512_castps_si512(half), _mm512_set1_epi32(i32::MAX));
            let largest = _mm512_reduce_max_epu32(_mm512_max_epu32(bits(first), bits(second)));
            let (scale, inverse) = rounding::scale(f32::from_bits(largest), rounding::limit(BYTES));
            // A value that is not finite gets an arbitrary code; the scale is then not finite
            // either.
            let code = |half| {
                _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(
                    half,
                    _mm512_set1_ps(inverse),
                )))
            };
            let (first, second) =
                (_mm512_cvtepi16_epi32(code(first)), _mm512_cvtepi16_epi32(code(second)));
            let high =
                |half| _mm512_srai_epi32::<8>(_mm512_add_epi32(half, _mm512_set1_epi32(128)));
            let mut codes = [0u8; 2 * BLOCK];
            for (i, half) in [high(first), high(second), first, second].into_iter().enumerate() {
                _mm_storeu_si128(
                    codes.as_mut_ptr().add(i * LANES).cast(),
                    _mm512_cvtepi32_epi8(half),
                );
            }
            Rounded::new(
                codes,
                scale,
                _mm512_reduce_add_epi32(first),
                _mm512_reduce_add_epi32(second),
            )
        }
    }

    #[inline(always)]
    unsafe fn start(offset: i32) -> Self::Sums {
        // SAFETY: the caller enables the features; only registers are touched.
        unsafe { (_mm512_setzero_si512(), _mm512_set1_epi32(offset)) }
    }

    #[inline(always)]
    unsafe fn start_each(zeros: *const u8, offset: i32) -> Self::Sums {
        // SAFETY: the caller enables the features and gives sixteen bytes.
        unsafe {
            let zeros = _mm512_cvtepu8_epi32(_mm_loadu_si128(zeros.cast()));
            (_mm512_setzero_si512(), _mm512_mullo_epi32(zeros, _mm512_set1_epi32(offset)))
        }
    }

    #[inline(always)]
    unsafe fn codes<Q: Quant, const STEP: usize>(planes: *const u8) -> __m512i {
        let f = const { Q::FORMAT };
        // SAFETY: the planes hold 32 columns.
        unsafe {
            let mut codes = field::<STEP>(planes, f.low, 0);
            if f.high > 0 {
                let high = field::<STEP>(planes.add(4 * LANES * f.low), f.high, f.low);
                codes = _mm512_or_si512(codes, high);
            }
            let Some(table) = f.table else { return codes };
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, codes)
        }
    }

    #[inline(always)]
    unsafe fn dot<Q: Quant, const STEP: usize>(
        (high, low): Self::Sums,
        codes: __m512i,
        x: &Rounded,
    ) -> Self::Sums {
        // SAFETY: eight steps of four bytes, twice.
        unsafe {
            let four = |at: usize| {
                _mm512_set1_epi32(
                    x.codes.as_ptr().add(at + 4 * STEP).cast::<i32>().read_unaligned(),
                )
            };
            let low = _mm512_dpbusd_epi32(low, codes, four(BLOCK));
            if BYTES == 1 {
                return (high, low);
            }
            (_mm512_dpbusd_epi32(high, codes, four(0)), low)
        }
    }

    #[inline(always)]
    unsafe fn finish((high, low): Self::Sums) -> Avx512 {
        // SAFETY: the caller enables the features; only registers are touched.
        unsafe {
            let sum =
                if BYTES == 1 { low } else { _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low) };
            Avx512(_mm512_cvtepi32_ps(sum))
        }
    }

    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: any address may be named.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    entry_points!("avx512f,avx512bw,avx512vnni");
}

/// The fields of `bits` bits of step `STEP`'s columns, moved up to bit `to` of each byte.
#[inline(always)]
unsafe fn field<const STEP: usize>(plane: *const u8, bits: usize, to: usize) -> __m512i {
    // SAFETY: a plane has BLOCK columns.
    unsafe {
        let per_byte = 8 / bits;
        let word = _mm512_loadu_si512(plane.add(STEP / per_byte * 4 * LANES).cast());
        if bits == 8 {
            return word;
        }
        let from = STEP % per_byte * bits;
        let moved = if to > from {
            _mm512_sllv_epi32(word, _mm512_set1_epi32((to - from) as i32))
        } else {
            _mm512_srlv_epi32(word, _mm512_set1_epi32((from - to) as i32))
        };
        _mm512_and_si512(moved, _mm512_set1_epi8((((1u32 << bits) - 1) << to) as u8 as i8))
    }
}

//! AVX2: products of sixteen-bit integers, two columns of eight outputs in one instruction. A
//! word's four columns are taken as its even and its odd bytes.
#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use crate::linear::format::{BLOCK, Quant};
use crate::linear::integer::{
    IntegerProduct, QuantisedOperands, entry_points, multiply, round_all,
};
use crate::linear::rounding::{Rounded, limit};
use crate::simd::{Avx2, LANES};
use std::arch::x86_64::*;

pub(in crate::linear) struct MultiplyAdd;

impl IntegerProduct for MultiplyAdd {
    type Lanes = Avx2;
    /// The codes of even columns and of odd columns, for eight outputs each.
    type Codes = [(__m256i, __m256i); 2];
    type Sums = [__m256i; 2];
    const TILE: (usize, usize) = (2, 1);

    #[inline(always)]
    fn round(x: &[f32; BLOCK]) -> Rounded {
        Rounded::plain(x, limit(2), arrange)
    }

    #[inline(always)]
    unsafe fn start(offset: i32) -> Self::Sums {
        // SAFETY: the caller enables the features; only registers are touched.
        unsafe { [_mm256_set1_epi32(offset); 2] }
    }

    #[inline(always)]
    unsafe fn start_each(zeros: *const u8, offset: i32) -> Self::Sums {
        // SAFETY: the caller enables the features and gives sixteen bytes.
        unsafe {
            let zeros = _mm_loadu_si128(zeros.cast());
            let offset = _mm256_set1_epi32(offset);
            [
                _mm256_mullo_epi32(_mm256_cvtepu8_epi32(zeros), offset),
                _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(zeros)), offset),
            ]
        }
    }

    #[inline(always)]
    unsafe fn codes<Q: Quant, const STEP: usize>(planes: *const u8) -> Self::Codes {
        // SAFETY: the planes hold 32 columns of sixteen outputs.
        unsafe {
            let second = planes.add(2 * LANES);
            [
                (columns::<Q, STEP>(planes, 0), columns::<Q, STEP>(planes, 1)),
                (columns::<Q, STEP>(second, 0), columns::<Q, STEP>(second, 1)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn dot<const STEP: usize>(
        sums: Self::Sums,
        codes: Self::Codes,
        x: &Rounded,
    ) -> Self::Sums {
        // SAFETY: eight steps of four columns, two bytes each.
        unsafe {
            let two = |at: usize| {
                _mm256_set1_epi32(
                    x.codes.as_ptr().add(at + 8 * STEP).cast::<i32>().read_unaligned(),
                )
            };
            let (even, odd) = (two(0), two(4));
            let add = |sum, codes: (__m256i, __m256i)| {
                let both = _mm256_add_epi32(
                    _mm256_madd_epi16(codes.0, even),
                    _mm256_madd_epi16(codes.1, odd),
                );
                _mm256_add_epi32(sum, both)
            };
            [add(sums[0], codes[0]), add(sums[1], codes[1])]
        }
    }

    #[inline(always)]
    unsafe fn finish(sums: Self::Sums) -> Avx2 {
        // SAFETY: the caller enables the features; only registers are touched.
        unsafe { Avx2(_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])) }
    }

    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: any address may be named.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    entry_points!("avx2,fma,f16c");
}

/// Puts the even columns of each four before the odd ones.
#[inline(always)]
fn arrange(codes: &[i16; BLOCK]) -> [u8; 2 * BLOCK] {
    let mut out = [0; 2 * BLOCK];
    for (codes, out) in codes.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<8>().0) {
        let [a, b, c, d] = codes.map(i16::to_le_bytes);
        *out = [a[0], a[1], c[0], c[1], b[0], b[1], d[0], d[1]];
    }
    out
}

/// The codes of step `STEP`'s even or odd columns, for the eight outputs with which `planes`
/// starts.
#[inline(always)]
unsafe fn columns<Q: Quant, const STEP: usize>(planes: *const u8, odd: usize) -> __m256i {
    let f = const { Q::FORMAT };
    // SAFETY: as above.
    unsafe {
        let mut codes = field::<STEP>(planes, odd, f.low, 0);
        if f.high > 0 {
            let high = field::<STEP>(planes.add(4 * LANES * f.low), odd, f.high, f.low);
            codes = _mm256_or_si256(codes, high);
        }
        let Some(table) = f.table else { return codes };
        // The upper byte of each code is zero, and so is what the table has for it.
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        _mm256_shuffle_epi8(table, codes)
    }
}

/// The fields of `bits` bits of step `STEP`'s even or odd columns, moved to bit `to` of sixteen.
#[inline(always)]
unsafe fn field<const STEP: usize>(
    plane: *const u8,
    odd: usize,
    bits: usize,
    to: usize,
) -> __m256i {
    // SAFETY: a plane has BLOCK columns.
    unsafe {
        let per_byte = 8 / bits;
        let word = _mm256_loadu_si256(plane.add(STEP / per_byte * 4 * LANES).cast());
        let from = STEP % per_byte * bits + 8 * odd;
        let moved = if to > from {
            _mm256_sllv_epi32(word, _mm256_set1_epi32((to - from) as i32))
        } else {
            _mm256_srlv_epi32(word, _mm256_set1_epi32((from - to) as i32))
        };
        _mm256_and_si256(moved, _mm256_set1_epi16((((1u32 << bits) - 1) << to) as i16))
    }
}

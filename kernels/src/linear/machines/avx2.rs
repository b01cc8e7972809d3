//! AVX2: products of sixteen-bit integers, two columns of eight outputs in one instruction. A
//! word's four columns are taken as its even and its odd bytes.
//!
//! A row takes 64 multiplications and additions for a block of a panel and 8 instructions to scale
//! their sums; 48 that unpack codes of four bits and 12 for scales serve all rows of a tile. Four
//! instructions run in a cycle. Predicted: 87 for each of four rows where two rows had taken 110,
//! 1.26 times as fast. Measured on a Zen 5, in its caches: Q4_K 1.18, Q6_K 1.40, Q4_0 1.28, Q8_0
//! 1.06. Where codes are unpacked once for many rows, 72 are left to each.
//! Sums of bytes (`avx2_bytes`) take as many instructions where activations have two bytes.
//! Half panels of eight rows take twice the loads of activations, and were 0.8 to 1.1 times as fast
//! as two rows.
#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use crate::linear::format::{BLOCK, Quant};
use crate::linear::integer::{
    IntegerProduct, QuantisedOperands, entry_points, multiply, multiply_piece, round_all,
};
use crate::linear::rounding::{Rounded, limit};
use crate::simd::{Avx2, LANES};
use std::arch::{asm, x86_64::*};

/// Activations of `BYTES` bytes, 1 or 2, each in sixteen bits.
pub(in crate::linear) struct Words<const BYTES: usize>;

impl<const BYTES: usize> IntegerProduct for Words<BYTES> {
    type Lanes = Avx2;
    /// The codes of even columns and of odd columns, for eight outputs each.
    type Codes = [(__m256i, __m256i); 2];
    type Sums = [__m256i; 2];
    /// Eight sums, four vectors of codes and two of products leave two of sixteen registers.
    const TILE: (usize, usize) = (4, 1);
    const MANY_ROWS: usize = 16;

    #[inline(always)]
    fn round(x: &[f32; BLOCK]) -> Rounded {
        Rounded::plain(x, limit(BYTES), arrange)
    }

    #[inline(always)]
    unsafe fn start(offset: i32) -> Self::Sums {
        // SAFETY: the caller enables the features; only registers are touched.
        unsafe { [_mm256_set1_epi32(offset); 2] }
    }

    #[inline(always)]
    unsafe fn start_each(zeros: *const u8, offset: i32) -> Self::Sums {
        // SAFETY: the caller's contract is passed on.
        unsafe { offsets(zeros, offset) }
    }

    #[inline(always)]
    unsafe fn codes<Q: Quant, const STEP: usize>(planes: *const u8) -> Self::Codes {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let [first, second] = columns::<Q, STEP>(planes);
            let low = _mm256_set1_epi16(0xff);
            [
                (_mm256_and_si256(first, low), _mm256_srli_epi16::<8>(first)),
                (_mm256_and_si256(second, low), _mm256_srli_epi16::<8>(second)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn dot<Q: Quant, const STEP: usize>(
        sums: Self::Sums,
        codes: Self::Codes,
        x: &Rounded,
    ) -> Self::Sums {
        let [first, second] = codes;
        // SAFETY: the caller enables the features.
        unsafe {
            let sums = add_products::<true, STEP, 0>(sums, [first.0, second.0], x);
            add_products::<true, STEP, 1>(sums, [first.1, second.1], x)
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

/// Adds products of step `STEP` to two vectors of sums. With `WORDS`: two vectors of codes times
/// the activations of the even columns (`PLACE` 0) or of the odd ones (1), in sums of 32 bits.
/// Otherwise: codes times the high bytes of the activations (0) or the low ones (1), in sixteen.
///
/// The compiler would multiply all steps of one vector first and keep the activations for the other
/// one in memory; so the instructions stand here in their order.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn add_products<const WORDS: bool, const STEP: usize, const PLACE: usize>(
    [mut first, mut second]: [__m256i; 2],
    codes: [__m256i; 2],
    x: &Rounded,
) -> [__m256i; 2] {
    macro_rules! add {
        ($multiply:literal, $add:literal) => {
            asm!(
                "vpbroadcastd {x}, dword ptr [{codes} + {at}]",
                concat!($multiply, " {products}, {c0}, {x}"),
                concat!($multiply, " {x}, {c1}, {x}"),
                concat!($add, " {first}, {first}, {products}"),
                concat!($add, " {second}, {second}, {x}"),
                x = out(ymm_reg) _,
                products = out(ymm_reg) _,
                c0 = in(ymm_reg) codes[0],
                c1 = in(ymm_reg) codes[1],
                first = inout(ymm_reg) first,
                second = inout(ymm_reg) second,
                codes = in(reg) &raw const x.codes,
                at = const if WORDS { 8 * STEP + 4 * PLACE } else { 4 * STEP + BLOCK * PLACE },
                options(pure, readonly, nostack, preserves_flags),
            )
        };
    }
    // SAFETY: four bytes are read inside the codes.
    unsafe {
        if WORDS {
            add!("vpmaddwd", "vpaddd");
        } else {
            add!("vpmaddubsw", "vpaddw");
        }
    }
    [first, second]
}

/// Four bytes of the activations' codes, for each of eight outputs.
#[inline(always)]
pub(super) unsafe fn four_bytes(x: &Rounded, at: usize) -> __m256i {
    // SAFETY: the caller enables the features, and the block has these bytes.
    unsafe { _mm256_set1_epi32(x.codes.as_ptr().add(at).cast::<i32>().read_unaligned()) }
}

/// The offset times each of sixteen zeros.
#[inline(always)]
pub(super) unsafe fn offsets(zeros: *const u8, offset: i32) -> [__m256i; 2] {
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

/// The codes of step `STEP`'s columns, or the numbers that they stand for, for eight outputs each.
#[inline(always)]
pub(super) unsafe fn columns<Q: Quant, const STEP: usize>(planes: *const u8) -> [__m256i; 2] {
    // SAFETY: the planes hold 32 columns of sixteen outputs.
    unsafe { [half::<Q, STEP>(planes), half::<Q, STEP>(planes.add(2 * LANES))] }
}

/// Those of the eight outputs with which `planes` starts.
#[inline(always)]
unsafe fn half<Q: Quant, const STEP: usize>(planes: *const u8) -> __m256i {
    let f = const { Q::FORMAT };
    // SAFETY: the caller enables the features, and the planes have this step.
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
        let count = _mm_cvtsi32_si128(to.abs_diff(from) as i32);
        let moved =
            if to > from { _mm256_sll_epi16(word, count) } else { _mm256_srl_epi16(word, count) };
        _mm256_and_si256(moved, _mm256_set1_epi8((((1u32 << bits) - 1) << to) as u8 as i8))
    }
}

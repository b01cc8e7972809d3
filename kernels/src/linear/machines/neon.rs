//! NEON: four outputs' four columns in one instruction where the machine has products of bytes,
//! sixteen outputs' one column in four instructions elsewhere.
#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use crate::linear::format::{BLOCK, Quant};
use crate::linear::integer::{
    IntegerProduct, QuantisedOperands, entry_points, multiply, multiply_piece, round_all,
};
use crate::linear::rounding::{Rounded, limit};
use crate::simd::{LANES, Neon};
use std::arch::{aarch64::*, asm};
use std::array::from_fn;

/// Products of activations of `BYTES` bytes, 1 or 2, for machines with the feature `i8mm`, which
/// multiplies unsigned bytes by signed ones (`MIXED`), or with `dotprod`, which multiplies signed
/// ones.
pub(in crate::linear) struct DotProduct<const MIXED: bool, const BYTES: usize>;

impl<const MIXED: bool, const BYTES: usize> IntegerProduct for DotProduct<MIXED, BYTES> {
    type Lanes = Neon;
    /// For four outputs each.
    type Codes = [uint8x16_t; 4];
    /// The sums of four outputs each: of products with the activations' high bytes, and with their
    /// low bytes. Where they have one byte, that is the low one.
    type Sums = [(int32x4_t, int32x4_t); 4];
    /// Sixteen chains of products, and the codes and activations of a step, leave eight of 32
    /// registers.
    const TILE: (usize, usize) = (4 / BYTES, 1);
    const MANY_ROWS: usize = 32;
    const BIAS: i32 = if MIXED { 0 } else { 128 };

    /// The high bytes, then the low ones, which are signed.
    #[inline(always)]
    fn round(x: &[f32; BLOCK]) -> Rounded {
        Rounded::split(x, BYTES)
    }

    #[inline(always)]
    unsafe fn start(offset: i32) -> Self::Sums {
        // SAFETY: only registers are touched.
        unsafe { [(vdupq_n_s32(0), vdupq_n_s32(offset)); 4] }
    }

    #[inline(always)]
    unsafe fn start_each(zeros: *const u8, offset: i32) -> Self::Sums {
        // SAFETY: the caller gives sixteen bytes.
        let low = unsafe { offsets(zeros, Self::BIAS, offset) };
        // SAFETY: only registers are touched.
        low.map(|low| (unsafe { vdupq_n_s32(0) }, low))
    }

    #[inline(always)]
    unsafe fn codes<Q: Quant, const STEP: usize>(planes: *const u8) -> Self::Codes {
        let per_vector = |i: usize| {
            // SAFETY: the planes hold 32 columns of sixteen outputs.
            unsafe {
                let codes = joined::<Q, STEP>(|at| vld1q_u8(planes.add(at + i * LANES)));
                veorq_u8(codes, vdupq_n_u8(Self::BIAS as u8))
            }
        };
        from_fn(per_vector)
    }

    #[inline(always)]
    unsafe fn dot<Q: Quant, const STEP: usize>(
        sums: Self::Sums,
        codes: Self::Codes,
        x: &Rounded,
    ) -> Self::Sums {
        // SAFETY: four steps of four bytes, and the caller says that the machine has the
        // instructions.
        unsafe {
            let steps = |at: usize| vld1q_s8(x.codes.as_ptr().add(at + STEP / 4 * LANES).cast());
            let low = steps(BLOCK);
            let low = |i: usize| add_products::<MIXED, STEP>(sums[i].1, codes[i], low);
            if BYTES == 1 {
                return from_fn(|i| (sums[i].0, low(i)));
            }
            let high = steps(0);
            from_fn(|i| (add_products::<MIXED, STEP>(sums[i].0, codes[i], high), low(i)))
        }
    }

    #[inline(always)]
    unsafe fn finish(sums: Self::Sums) -> Neon {
        Neon(sums.map(|(high, low)| {
            // SAFETY: only registers are touched.
            unsafe {
                let sum = if BYTES == 1 { low } else { vaddq_s32(vshlq_n_s32::<8>(high), low) };
                vcvtq_f32_s32(sum)
            }
        }))
    }

    #[inline(always)]
    fn prefetch(at: *const u8) {
        prefetch(at);
    }

    entry_points!();
}

/// Adds to four outputs' sums the products of their four columns with those of step `STEP` among
/// four steps' activations. The standard library has no stable functions for the instructions.
#[inline(always)]
unsafe fn add_products<const MIXED: bool, const STEP: usize>(
    mut sums: int32x4_t,
    codes: uint8x16_t,
    x: int8x16_t,
) -> int32x4_t {
    macro_rules! add {
        ($extension:literal, $instruction:literal) => {
            asm!(
                concat!(".arch_extension ", $extension),
                concat!($instruction, " {sums:v}.4s, {codes:v}.16b, {x:v}.4b[{step}]"),
                sums = inlateout(vreg) sums,
                codes = in(vreg) codes,
                x = in(vreg) x,
                step = const STEP % 4,
                options(pure, nomem, nostack, preserves_flags),
            )
        };
    }
    // SAFETY: the machine has the instruction; only registers are touched.
    unsafe {
        if MIXED {
            add!("i8mm", "usdot");
        } else {
            add!("dotprod", "sdot");
        }
    }
    sums
}

/// Products of numbers of sixteen bits, for any machine.
pub(in crate::linear) struct Widening;

impl IntegerProduct for Widening {
    type Lanes = Neon;
    /// For one column each.
    type Codes = [uint8x16_t; 4];
    /// For four outputs each.
    type Sums = [int32x4_t; 4];
    const TILE: (usize, usize) = (4, 1);
    const MANY_ROWS: usize = 32;

    #[inline(always)]
    fn round(x: &[f32; BLOCK]) -> Rounded {
        Rounded::plain(x, limit(2), |codes| from_fn(|i| codes[i / 2].to_le_bytes()[i % 2]))
    }

    #[inline(always)]
    unsafe fn start(offset: i32) -> Self::Sums {
        // SAFETY: only registers are touched.
        unsafe { [vdupq_n_s32(offset); 4] }
    }

    #[inline(always)]
    unsafe fn start_each(zeros: *const u8, offset: i32) -> Self::Sums {
        // SAFETY: the caller gives sixteen bytes.
        unsafe { offsets(zeros, 0, offset) }
    }

    #[inline(always)]
    unsafe fn codes<Q: Quant, const STEP: usize>(planes: *const u8) -> Self::Codes {
        let column = |j: usize| {
            // SAFETY: the planes hold 32 columns of sixteen outputs.
            unsafe {
                joined::<Q, STEP>(|at| {
                    let uint8x16x4_t(a, b, c, d) = vld4q_u8(planes.add(at));
                    [a, b, c, d][j]
                })
            }
        };
        from_fn(column)
    }

    #[inline(always)]
    unsafe fn dot<Q: Quant, const STEP: usize>(
        mut sums: Self::Sums,
        codes: Self::Codes,
        x: &Rounded,
    ) -> Self::Sums {
        for (j, codes) in codes.into_iter().enumerate() {
            let at = 8 * STEP + 2 * j;
            let x = i16::from_le_bytes([x.codes[at], x.codes[at + 1]]);
            // SAFETY: only registers are touched.
            unsafe {
                let first = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(codes)));
                let second = vreinterpretq_s16_u16(vmovl_high_u8(codes));
                sums[0] = vmlal_n_s16(sums[0], vget_low_s16(first), x);
                sums[1] = vmlal_high_n_s16(sums[1], first, x);
                sums[2] = vmlal_n_s16(sums[2], vget_low_s16(second), x);
                sums[3] = vmlal_high_n_s16(sums[3], second, x);
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn finish(sums: Self::Sums) -> Neon {
        // SAFETY: only registers are touched.
        Neon(sums.map(|sums| unsafe { vcvtq_f32_s32(sums) }))
    }

    #[inline(always)]
    fn prefetch(at: *const u8) {
        prefetch(at);
    }

    entry_points!();
}

#[inline(always)]
fn prefetch(at: *const u8) {
    // SAFETY: any address may be named.
    unsafe { asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nostack, preserves_flags)) }
}

/// The offset times each of sixteen zeros, from which `bias` is taken first.
#[inline(always)]
unsafe fn offsets(zeros: *const u8, bias: i32, offset: i32) -> [int32x4_t; 4] {
    // SAFETY: the caller gives sixteen bytes.
    let zeros = unsafe { zeros.cast::<[u8; LANES]>().read() };
    let all = zeros.map(|zero| (i32::from(zero) - bias) * offset);
    // SAFETY: each fourth of the array has four lanes.
    from_fn(|i| unsafe { vld1q_s32(all.as_ptr().add(4 * i)) })
}

/// The codes of step `STEP`, or the numbers that they stand for, of the bytes that `load` takes
/// from a word of the planes, which begins at a byte of them.
#[inline(always)]
fn joined<Q: Quant, const STEP: usize>(load: impl Fn(usize) -> uint8x16_t) -> uint8x16_t {
    let f = const { Q::FORMAT };
    // The fields of `bits` bits of a plane, moved up to bit `to` of each byte.
    let field = |plane: usize, bits: usize, to: usize| {
        let per_byte = 8 / bits;
        let word = load(plane + STEP / per_byte * 4 * LANES);
        let by = to as i8 - (STEP % per_byte * bits) as i8;
        // SAFETY: only registers are touched.
        unsafe {
            vandq_u8(vshlq_u8(word, vdupq_n_s8(by)), vdupq_n_u8((u8::MAX >> (8 - bits)) << to))
        }
    };
    let mut codes = field(0, f.low, 0);
    // SAFETY: only registers are touched, and a table has sixteen bytes.
    unsafe {
        if f.high > 0 {
            codes = vorrq_u8(codes, field(4 * LANES * f.low, f.high, f.low));
        }
        f.table.map_or(codes, |table| vqtbl1q_u8(vld1q_u8(table.as_ptr()), codes))
    }
}

//! Four 128-bit registers.
//!
//! Every `unsafe` here is sound because all machines with this architecture have the instructions.
#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use super::lanes::{LANES, Lanes};
use std::arch::aarch64::*;
use std::array::from_fn;

#[derive(Clone, Copy)]
pub(crate) struct Neon(pub [float32x4_t; 4]);

impl Neon {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        Self(from_fn(|i| f(self.0[i], other.0[i])))
    }

    /// The values of sixteen halves.
    #[inline(always)]
    fn of_halves(halves: [uint16x8_t; 2]) -> Self {
        let [first, second] = halves.map(|halves| {
            // SAFETY: only registers are touched.
            unsafe {
                let halves = vreinterpretq_f16_u16(halves);
                [vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)]
            }
        });
        Self([first[0], first[1], second[0], second[1]])
    }
}

/// The eight numbers of sixteen bits from byte `16 * i` on.
#[inline(always)]
fn words(from: &[u8; 2 * LANES], i: usize) -> uint16x8_t {
    // SAFETY: the array has room for 16 lanes.
    unsafe { vreinterpretq_u16_u8(vld1q_u8(from.as_ptr().add(16 * i))) }
}

impl Lanes for Neon {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: only registers are touched.
        Self([unsafe { vdupq_n_f32(x) }; 4])
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        // SAFETY: the array has room for 16 lanes.
        Self(from_fn(|i| unsafe { vld1q_f32(from.as_ptr().add(4 * i)) }))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        for (to, lanes) in to.as_chunks_mut::<4>().0.iter_mut().zip(self.0) {
            // SAFETY: the chunk has room for four lanes.
            unsafe { vst1q_f32(to.as_mut_ptr(), lanes) }
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: only registers are touched.
        self.zip(other, |a, b| unsafe { vaddq_f32(a, b) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: only registers are touched.
        self.zip(other, |a, b| unsafe { vmulq_f32(a, b) })
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: only registers are touched.
        self.zip(other, |a, b| unsafe { vdivq_f32(a, b) })
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        // SAFETY: only registers are touched.
        Self(from_fn(|i| unsafe { vfmaq_f32(b.0[i], self.0[i], a.0[i]) }))
    }
    /// Not `vmaxq_f32`, which keeps NaN of either side.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: only registers are touched.
        self.zip(other, |a, b| unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) })
    }
    #[inline(always)]
    fn scale(self, n: Self) -> Self {
        // SAFETY: only registers are touched.
        self.zip(n, |x, n| unsafe {
            let exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
            vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent)))
        })
    }
    #[inline(always)]
    fn load_f16(from: &[u8; 2 * LANES]) -> Self {
        Self::of_halves(from_fn(|i| words(from, i)))
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [u8; 2 * LANES]) {
        for (to, lanes) in to.as_chunks_mut::<8>().0.iter_mut().zip(self.0) {
            // SAFETY: the chunk has room for four halves.
            unsafe { vst1_u8(to.as_mut_ptr(), vreinterpret_u8_f16(vcvt_f16_f32(lanes))) }
        }
    }
    #[inline(always)]
    fn load_bf16(from: &[u8; 2 * LANES]) -> Self {
        Self(from_fn(|i| {
            let words = words(from, i / 2);
            // SAFETY: only registers are touched.
            unsafe {
                let half = if i % 2 == 0 { vget_low_u16(words) } else { vget_high_u16(words) };
                vreinterpretq_f32_u32(vshll_n_u16::<16>(half))
            }
        }))
    }
    #[inline(always)]
    fn load_e4m3(from: &[u8; LANES]) -> Self {
        // SAFETY: the array has room for 16 lanes.
        unsafe {
            let codes = vld1q_s8(from.as_ptr().cast());
            // The sign stays where it is, and all other bits but one copy of it move up.
            let moved = [vshll_n_s8::<7>(vget_low_s8(codes)), vshll_high_n_s8::<7>(codes)];
            Self::of_halves(
                moved.map(|moved| vandq_u16(vreinterpretq_u16_s16(moved), vdupq_n_u16(0xbf80))),
            )
        }
    }
    #[inline(always)]
    fn load_e5m2(from: &[u8; LANES]) -> Self {
        // SAFETY: the array has room for 16 lanes.
        unsafe {
            let (codes, zeros) = (vld1q_u8(from.as_ptr()), vdupq_n_u8(0));
            Self::of_halves(
                [vzip1q_u8(zeros, codes), vzip2q_u8(zeros, codes)].map(|u| vreinterpretq_u16_u8(u)),
            )
        }
    }
    #[inline(always)]
    fn load_i8(from: &[u8; LANES]) -> Self {
        // SAFETY: the array has room for 16 lanes.
        unsafe {
            let bytes = vld1q_s8(from.as_ptr().cast());
            let (first, second) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            let float = |lanes| vcvtq_f32_s32(lanes);
            Self([
                float(vmovl_s16(vget_low_s16(first))),
                float(vmovl_high_s16(first)),
                float(vmovl_s16(vget_low_s16(second))),
                float(vmovl_high_s16(second)),
            ])
        }
    }
}

//! One 512-bit register.
//!
//! Every `unsafe` here is sound because the type is only used inside functions that enable the
//! instructions and are entered only after run-time detection.
#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use super::lanes::{LANES, Lanes};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(crate) struct Avx512(pub __m512);

impl Lanes for Avx512 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        Self(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        Self(unsafe { _mm512_loadu_ps(from.as_ptr()) })
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        Self(unsafe { _mm512_div_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        Self(unsafe { _mm512_fmadd_ps(self.0, a.0, b.0) })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        Self(unsafe { _mm512_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn scale(self, n: Self) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        unsafe {
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.0), _mm512_set1_epi32(127));
            let power = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent));
            Self(_mm512_mul_ps(self.0, power))
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: the features were found at run time, and only registers are touched.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        // SAFETY: the features were found at run time, and only registers are touched.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    #[inline(always)]
    fn load_f16(from: &[u8; 2 * LANES]) -> Self {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) })
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [u8; 2 * LANES]) {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtps_ph::<0>(self.0)) }
    }
    #[inline(always)]
    fn load_bf16(from: &[u8; 2 * LANES]) -> Self {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }
    #[inline(always)]
    fn load_e4m3(from: &[u8; LANES]) -> Self {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        unsafe {
            let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.as_ptr().cast()));
            // The sign stays where it is, and all other bits but one copy of it move up.
            let moved = _mm256_slli_epi16::<7>(wide);
            Self(_mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(0xbf80_u16 as i16))))
        }
    }
    #[inline(always)]
    fn load_e5m2(from: &[u8; LANES]) -> Self {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        unsafe {
            let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.as_ptr().cast()));
            Self(_mm512_cvtph_ps(_mm256_slli_epi16::<8>(wide)))
        }
    }
    #[inline(always)]
    fn load_i8(from: &[u8; LANES]) -> Self {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        Self(unsafe {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast())))
        })
    }
}

//! Two 256-bit registers.
//!
//! Every `unsafe` here is sound because the type is only used inside functions that enable the
//! instructions and are entered only after run-time detection.
#![allow(clippy::wildcard_imports, reason = "intrinsics are named by their prefix")]

use super::lanes::{LANES, Lanes};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(crate) struct Avx2(pub __m256, pub __m256);

impl Lanes for Avx2 {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        let v = unsafe { _mm256_set1_ps(x) };
        Self(v, v)
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        unsafe {
            let start = from.as_ptr();
            Self(_mm256_loadu_ps(start), _mm256_loadu_ps(start.add(8)))
        }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        unsafe {
            let start = to.as_mut_ptr();
            _mm256_storeu_ps(start, self.0);
            _mm256_storeu_ps(start.add(8), self.1);
        }
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        unsafe { Self(_mm256_add_ps(self.0, o.0), _mm256_add_ps(self.1, o.1)) }
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        unsafe { Self(_mm256_mul_ps(self.0, o.0), _mm256_mul_ps(self.1, o.1)) }
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        unsafe { Self(_mm256_div_ps(self.0, o.0), _mm256_div_ps(self.1, o.1)) }
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        unsafe { Self(_mm256_fmadd_ps(self.0, a.0, b.0), _mm256_fmadd_ps(self.1, a.1, b.1)) }
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        unsafe { Self(_mm256_max_ps(self.0, o.0), _mm256_max_ps(self.1, o.1)) }
    }
    #[inline(always)]
    fn scale(self, n: Self) -> Self {
        // SAFETY: the features were found at run time, and only registers are touched.
        unsafe {
            let power = |n: __m256| {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
            };
            Self(_mm256_mul_ps(self.0, power(n.0)), _mm256_mul_ps(self.1, power(n.1)))
        }
    }
    #[inline(always)]
    fn load_f16(from: &[u8; 2 * LANES]) -> Self {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        let half = |i| unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(i).cast())) };
        Self(half(0), half(16))
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [u8; 2 * LANES]) {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        unsafe {
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm256_cvtps_ph::<0>(self.0));
            _mm_storeu_si128(to.as_mut_ptr().add(LANES).cast(), _mm256_cvtps_ph::<0>(self.1));
        }
    }
    #[inline(always)]
    fn load_bf16(from: &[u8; 2 * LANES]) -> Self {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        let half = |i| unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().add(i).cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        };
        Self(half(0), half(16))
    }
    #[inline(always)]
    fn load_e4m3(from: &[u8; LANES]) -> Self {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        let half = |i| unsafe {
            let wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(from.as_ptr().add(i).cast()));
            // The sign stays where it is, and all other bits but one copy of it move up.
            let moved = _mm_slli_epi16::<7>(wide);
            _mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16(0xbf80_u16 as i16)))
        };
        Self(half(0), half(8))
    }
    #[inline(always)]
    fn load_e5m2(from: &[u8; LANES]) -> Self {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        let half = |i| unsafe {
            let wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(from.as_ptr().add(i).cast()));
            _mm256_cvtph_ps(_mm_slli_epi16::<8>(wide))
        };
        Self(half(0), half(8))
    }
    #[inline(always)]
    fn load_i8(from: &[u8; LANES]) -> Self {
        // SAFETY: the features were found at run time, and the array has room for 16 lanes.
        let half = |i| unsafe {
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.as_ptr().add(i).cast())))
        };
        Self(half(0), half(8))
    }
}

//! Two 256-bit registers.
#![allow(clippy::wildcard_imports, reason = "the intrinsics are this file's vocabulary")]

use super::Lanes;
use std::arch::x86_64::*;

pub(in crate::linear) struct Avx2;

/// The same operation on both halves.
macro_rules! halves {
    ($i:ident => $e:expr) => {
        [
            {
                let $i = 0;
                $e
            },
            {
                let $i = 1;
                $e
            },
        ]
    };
}

impl Lanes for Avx2 {
    type F = [__m256; 2];
    type U = [__m256i; 2];
    const ROWS: usize = 4;
    const ACCUMULATORS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        unsafe { halves!(i => _mm256_loadu_ps(p.add(8 * i))) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::F) {
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        unsafe { halves!(i => _mm256_add_ps(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        unsafe { halves!(i => _mm256_mul_ps(a[i], b[i])) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe { halves!(i => _mm256_fmadd_ps(a[i], b[i], c[i])) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        unsafe { halves!(i => _mm256_cvtph_ps(_mm_loadu_si128(p.add(16 * i).cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        unsafe {
            halves!(i => {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16 * i).cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::F {
        unsafe { halves!(i => _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8 * i).cast())))) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::U {
        unsafe { halves!(i => _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8 * i).cast()))) }
    }
    #[inline(always)]
    unsafe fn load_u32(p: *const u8) -> Self::U {
        unsafe { halves!(i => _mm256_loadu_si256(p.add(32 * i).cast())) }
    }
    #[inline(always)]
    unsafe fn shift_right(v: Self::U, bits: u32) -> Self::U {
        unsafe { halves!(i => _mm256_srlv_epi32(v[i], _mm256_set1_epi32(bits as i32))) }
    }
    /// Two tables of eight; bit 3 of the index chooses.
    #[inline(always)]
    unsafe fn lookup(table: Self::F, v: Self::U) -> Self::F {
        unsafe {
            halves!(i => {
                let low = _mm256_permutevar8x32_ps(table[0], v[i]);
                let high = _mm256_permutevar8x32_ps(table[1], v[i]);
                let bit3 = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(v[i]));
                _mm256_blendv_ps(low, high, bit3)
            })
        }
    }

    super::entry_points!("avx2,fma,f16c");
}

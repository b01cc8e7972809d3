//! Plain arrays: any machine.

use super::{LANES, Lanes};
use half::{bf16, f16};
use std::array::from_fn;

pub(in crate::linear) struct Portable;

/// Fused where the target has the instruction; elsewhere `mul_add` would be a slow library call.
#[inline(always)]
fn fma(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
unsafe fn read<T: Copy, R>(p: *const u8, convert: impl Fn(T) -> R) -> [R; LANES] {
    from_fn(|i| convert(unsafe { p.cast::<T>().add(i).read_unaligned() }))
}

impl Lanes for Portable {
    type F = [f32; LANES];
    type U = [u32; LANES];
    const ROWS: usize = 4;
    const ACCUMULATORS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::F) {
        unsafe { p.cast::<Self::F>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        from_fn(|i| fma(a[i], b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        unsafe { read(p, f16::to_f32) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        unsafe { read(p, bf16::to_f32) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::F {
        unsafe { read(p, |x: i8| f32::from(x)) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::U {
        unsafe { read(p, |x: u8| u32::from(x)) }
    }
    #[inline(always)]
    unsafe fn load_u32(p: *const u8) -> Self::U {
        unsafe { read(p, |x: u32| x) }
    }
    #[inline(always)]
    unsafe fn shift_right(v: Self::U, bits: u32) -> Self::U {
        v.map(|x| x >> bits)
    }
    #[inline(always)]
    unsafe fn lookup(table: Self::F, v: Self::U) -> Self::F {
        v.map(|x| table[(x & 15) as usize])
    }

    super::entry_points!();
}

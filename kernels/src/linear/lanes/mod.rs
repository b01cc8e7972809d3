//! Sixteen f32 lanes: the few operations that decoding and the micro-kernel are written in, once per instruction set.
//! A weight panel is sixteen outputs wide whatever the machine, so packed weights are the same everywhere.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
pub(super) use portable::Portable;

use super::decode::{Codec, Columns};
use super::fused::Direct;
use super::tile::Operands;

pub(super) const LANES: usize = 16;

/// # Safety
/// Every function needs the instruction set that the type stands for, and pointers valid for sixteen elements of what the
/// function names (no alignment needed).
pub(super) trait Lanes: Sized {
    /// 16 × f32.
    type F: Copy;
    /// 16 × u32.
    type U: Copy;
    /// Rows of a tile that are worked on together.
    const ROWS: usize;
    /// Accumulators that fit the registers.
    const ACCUMULATORS: usize;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, v: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn load_f16(p: *const u8) -> Self::F;
    unsafe fn load_bf16(p: *const u8) -> Self::F;
    unsafe fn load_i8(p: *const u8) -> Self::F;
    unsafe fn load_u8(p: *const u8) -> Self::U;
    unsafe fn load_u32(p: *const u8) -> Self::U;
    unsafe fn shift_right(v: Self::U, bits: u32) -> Self::U;
    /// `table[v & 15]`: a field of up to four bits becomes its value in one step.
    unsafe fn lookup(table: Self::F, v: Self::U) -> Self::F;

    /// `decode::decode` compiled for this instruction set.
    unsafe fn decode<C: Codec>(columns: &Columns, out: *mut f32);
    /// `tile::multiply` compiled for this instruction set.
    unsafe fn multiply<const ROWS: usize, const PANELS: usize>(operands: &Operands);
    /// `fused::multiply` compiled for this instruction set.
    unsafe fn multiply_direct<C: Codec, const ROWS: usize, const PANELS: usize>(operands: &Direct);
}

/// The entry points that compile the generic kernels for an instruction set.
macro_rules! entry_points {
    ($($feature:literal)?) => {
        $(#[target_feature(enable = $feature)])?
        unsafe fn decode<C: crate::linear::decode::Codec>(
            columns: &crate::linear::decode::Columns,
            out: *mut f32,
        ) {
            // SAFETY: the caller's contract is passed on.
            unsafe { crate::linear::decode::decode::<Self, C>(columns, out) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn multiply<const ROWS: usize, const PANELS: usize>(
            operands: &crate::linear::tile::Operands,
        ) {
            // SAFETY: the caller's contract is passed on.
            unsafe { crate::linear::tile::multiply::<Self, ROWS, PANELS>(operands) }
        }

        $(#[target_feature(enable = $feature)])?
        unsafe fn multiply_direct<C: crate::linear::decode::Codec, const ROWS: usize, const PANELS: usize>(
            operands: &crate::linear::fused::Direct,
        ) {
            // SAFETY: the caller's contract is passed on.
            unsafe { crate::linear::fused::multiply::<Self, C, ROWS, PANELS>(operands) }
        }
    };
}
use entry_points;

//! The types of values in CPU tensors: f32, f16 for caches that take half the memory, and u32 for
//! numbers of rows.

use crate::simd::{LANES, Lanes};
use candle_core::{CpuStorage, WithDType};
#[cfg(feature = "rounding")]
use half::bf16;
use half::f16;

/// A type of which CPU tensors hold values.
pub(crate) trait Stored: WithDType + Default {
    /// The storage's values, if they are of this type.
    fn of_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    /// The value, rounded to bf16 if it is a number with a fraction.
    #[cfg(feature = "rounding")]
    fn as_bf16(self) -> Self;
}

/// A type of activations, of which vectors are loaded and stored.
pub(crate) trait Element: Stored {
    fn load<L: Lanes>(from: &[Self; LANES]) -> L;
    /// Stores lanes, rounded to nearest, ties to even. Values beyond the type's largest number
    /// become that number: one infinite key would make every later output NaN.
    fn store<L: Lanes>(lanes: L, to: &mut [Self; LANES]);
}

impl Stored for u32 {
    fn of_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::U32(data) = storage { Some(data) } else { None }
    }

    #[cfg(feature = "rounding")]
    fn as_bf16(self) -> Self {
        self
    }
}

impl Stored for f32 {
    fn of_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::F32(data) = storage { Some(data) } else { None }
    }

    #[cfg(feature = "rounding")]
    fn as_bf16(self) -> Self {
        bf16::from_f32(self).to_f32()
    }
}

impl Element for f32 {
    #[inline(always)]
    fn load<L: Lanes>(from: &[Self; LANES]) -> L {
        L::load(from)
    }

    #[inline(always)]
    fn store<L: Lanes>(lanes: L, to: &mut [Self; LANES]) {
        lanes.store(to);
    }
}

impl Stored for f16 {
    fn of_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
        if let CpuStorage::F16(data) = storage { Some(data) } else { None }
    }

    #[cfg(feature = "rounding")]
    fn as_bf16(self) -> Self {
        Self::from_f32(bf16::from_f32(self.to_f32()).to_f32())
    }
}

impl Element for f16 {
    #[inline(always)]
    fn load<L: Lanes>(from: &[Self; LANES]) -> L {
        // SAFETY: sixteen halves are 32 bytes.
        L::load_f16(unsafe { &*from.as_ptr().cast() })
    }

    #[inline(always)]
    fn store<L: Lanes>(lanes: L, to: &mut [Self; LANES]) {
        // Both bounds are applied by `max` with the lower bound, the second time to the negated
        // value: NaN is then on the right of `max` and stays NaN.
        let (least, minus) = (L::splat(f16::MIN.to_f32()), L::splat(-1.0));
        let negated = least.max(lanes).mul(minus);
        let lanes = least.max(negated).mul(minus);
        // SAFETY: as above.
        lanes.store_f16(unsafe { &mut *to.as_mut_ptr().cast() });
    }
}

/// Loads up to a full vector; missing lanes are zero.
#[inline(always)]
pub(crate) fn load_some<L: Lanes, E: Element>(data: &[E]) -> L {
    if let Some(full) = data.first_chunk() {
        return E::load(full);
    }
    let mut padded = [E::default(); LANES];
    padded[..data.len()].copy_from_slice(data);
    E::load(&padded)
}

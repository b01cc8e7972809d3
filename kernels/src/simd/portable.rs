//! Sixteen lanes as plain arrays, for any machine.

use super::lanes::{LANES, Lanes, e4m3, e5m2};
use half::{bf16, f16};

#[derive(Clone, Copy)]
pub(crate) struct Portable(pub [f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Lanes for Portable {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        Self(*from)
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        self.mul(a).add(b)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn scale(self, n: Self) -> Self {
        self.zip(n, |x, n| x * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn load_f16(from: &[u8; 2 * LANES]) -> Self {
        Self(std::array::from_fn(|i| f16::from_le_bytes([from[2 * i], from[2 * i + 1]]).to_f32()))
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [u8; 2 * LANES]) {
        for (to, x) in to.as_chunks_mut().0.iter_mut().zip(self.0) {
            *to = f16::from_f32(x).to_le_bytes();
        }
    }
    #[inline(always)]
    fn load_bf16(from: &[u8; 2 * LANES]) -> Self {
        Self(std::array::from_fn(|i| bf16::from_le_bytes([from[2 * i], from[2 * i + 1]]).to_f32()))
    }
    #[inline(always)]
    fn load_e4m3(from: &[u8; LANES]) -> Self {
        Self(from.map(e4m3))
    }
    #[inline(always)]
    fn load_e5m2(from: &[u8; LANES]) -> Self {
        Self(from.map(e5m2))
    }
    #[inline(always)]
    fn load_i8(from: &[u8; LANES]) -> Self {
        Self(std::array::from_fn(|i| f32::from(from[i].cast_signed())))
    }
}

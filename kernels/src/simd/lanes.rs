//! What every instruction set gives: sixteen f32 lanes, and floats of eight bits.

use half::f16;

pub(crate) const LANES: usize = 16;

/// By how much the f16 with the bits of an E4M3 float is smaller: their exponents are biased by 15
/// and by 7.
pub(crate) const E4M3_UNIT: f32 = 256.0;

/// The value of a float with a sign, four bits of exponent and three of mantissa, divided by
/// [`E4M3_UNIT`]. The codes `0x7f` and `0xff`, which stand for no number, become ±480.
/// Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
#[inline(always)]
pub(crate) fn e4m3(code: u8) -> f32 {
    let code = u16::from(code);
    f16::from_bits((code & 0x80) << 8 | (code & 0x7f) << 7).to_f32()
}

/// The value of a float with a sign, five bits of exponent and two of mantissa: the upper half of
/// an f16.
#[inline(always)]
pub(crate) fn e5m2(code: u8) -> f32 {
    f16::from_bits(u16::from(code) << 8).to_f32()
}

/// A vector of [`LANES`] f32.
pub(crate) trait Lanes: Copy {
    fn splat(x: f32) -> Self;
    fn load(from: &[f32; LANES]) -> Self;
    fn store(self, to: &mut [f32; LANES]);
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// `self * a + b`, rounded once where the hardware can.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// The larger of each pair; `other` where either is NaN.
    fn max(self, other: Self) -> Self;
    /// Stores little-endian halves.
    fn store_f16(self, to: &mut [u8; 2 * LANES]);
    fn load_f16(from: &[u8; 2 * LANES]) -> Self;
    fn load_bf16(from: &[u8; 2 * LANES]) -> Self;
    /// Loads signed bytes.
    fn load_i8(from: &[u8; LANES]) -> Self;
    /// Loads floats of eight bits (E4M3), divided by [`E4M3_UNIT`].
    fn load_e4m3(from: &[u8; LANES]) -> Self;
    /// Loads floats of eight bits (E5M2).
    fn load_e5m2(from: &[u8; LANES]) -> Self;
    /// `self * 2^n` for integral `n` in [-127, 128]; -127 gives zero.
    fn scale(self, n: Self) -> Self;

    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        self.store(&mut out);
        out
    }

    /// The sum as a balanced tree.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut v = self.to_array();
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                v[i] += v[i + half];
            }
        }
        v[0]
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        let mut v = self.to_array();
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                v[i] = if v[i] > v[i + half] { v[i] } else { v[i + half] };
            }
        }
        v[0]
    }

    /// e^x within 2 ulp; 0 below -87.7, infinity above 88.3, NaN kept. Cody-Waite reduction and
    /// Cephes' polynomial.
    #[inline(always)]
    fn exp(self) -> Self {
        /// 1.5 · 2^23: adding it rounds to an integer.
        const ROUND: f32 = 12_582_912.0;
        let x = Self::splat(-88.0).max(self);
        let x = Self::splat(-88.8).max(x.mul(Self::splat(-1.0))).mul(Self::splat(-1.0));
        let n = x
            .mul_add(Self::splat(std::f32::consts::LOG2_E), Self::splat(ROUND))
            .add(Self::splat(-ROUND));
        let r = n.mul_add(Self::splat(-0.693_359_4), x);
        let r = n.mul_add(Self::splat(2.121_944_4e-4), r);
        let mut p = Self::splat(1.987_569_1e-4);
        for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 0.5] {
            p = p.mul_add(r, Self::splat(c));
        }
        let p = p.mul_add(r.mul(r), r.add(Self::splat(1.0)));
        p.scale(n)
    }
}

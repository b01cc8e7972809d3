//! What quantised weights are multiplied with: each row's activations in sixteen bits, one scale
//! for every 32 columns. The error is at most 2^-16 of a block's largest value, 256 times finer
//! than the eight bits that other CPU engines round to.

use super::format::BLOCK;
use super::integer::Integer;
use crate::simd::vectorised;

/// Codes lie in ±`LIMIT`, 127 · 257: both bytes of such a code, the low one signed, fit a signed
/// byte.
const LIMIT: f32 = 32_639.0;
/// A block without a larger value counts as zeros: the inverse of its scale could overflow.
const NOTHING: f32 = 1e-30;

/// 32 columns of a row.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct Rounded {
    /// In the order that the instruction set's products want.
    pub codes: [u8; 2 * BLOCK],
    pub scale: f32,
    /// Minus the sum of the codes: of the first half, the second, both.
    pub offsets: [i32; 3],
    /// The sums of the values that the codes stand for: likewise.
    pub sums: [f32; 3],
}

impl Rounded {
    pub const ZERO: Self =
        Self { codes: [0; 2 * BLOCK], scale: 0.0, offsets: [0; 3], sums: [0.0; 3] };
}

/// The block's scale, and what its values are multiplied with to give codes. Values that are not
/// finite make the scale so.
#[inline(always)]
pub(super) fn scale(largest: f32) -> (f32, f32) {
    (largest / LIMIT, if largest > NOTHING { LIMIT / largest } else { 0.0 })
}

/// A block's codes and scale.
#[inline(always)]
pub(super) fn round(x: &[f32; BLOCK]) -> ([i16; BLOCK], f32) {
    /// 1.5 · 2^23: adding it rounds to an integer, ties to even, and leaves that in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // Without the sign, bits order magnitudes, and NaN comes out above all.
    let largest =
        f32::from_bits(x.iter().fold(0, |largest, x| largest.max(x.to_bits() & (u32::MAX >> 1))));
    let (scale, inverse) = scale(largest);
    let code = |x: f32| (x * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i16;
    (x.map(code), scale)
}

impl Rounded {
    /// Of codes as the products want them, and their sums over the first half and the second.
    #[inline(always)]
    pub fn new(codes: [u8; 2 * BLOCK], scale: f32, first: i32, second: i32) -> Self {
        let sums = [first, second, first + second];
        Self {
            codes,
            scale,
            offsets: sums.map(|sum| -sum),
            sums: sums.map(|sum| sum as f32 * scale),
        }
    }

    /// Without a machine's own instructions.
    #[inline(always)]
    pub fn plain(x: &[f32; BLOCK], arrange: impl Fn(&[i16; BLOCK]) -> [u8; 2 * BLOCK]) -> Self {
        let (codes, scale) = round(x);
        let (first, second) = codes.split_at(BLOCK / 2);
        let sum = |half: &[i16]| half.iter().map(|code| i32::from(*code)).sum();
        Self::new(arrange(&codes), scale, sum(first), sum(second))
    }
}

vectorised! {
    /// Whole blocks.
    pub(super) fn round_all(x: &[f32], out: &mut [Rounded]) = round_with
}

#[inline(always)]
fn round_with<L: Integer>(x: &[f32], out: &mut [Rounded]) {
    for (x, out) in x.as_chunks().0.iter().zip(out) {
        *out = L::round(x);
    }
}

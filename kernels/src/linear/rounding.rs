//! The activations with which quantised weights are multiplied: those of each row in sixteen bits,
//! with one scale for every 32 columns. The error is at most 2^-16 of a block's largest value, 256
//! times finer than the eight bits that other CPU engines round to. Who prefers speed may have
//! eight bits too: on AVX-512 a product then takes half as many instructions.

use super::format::BLOCK;
use std::array::from_fn;

/// The largest magnitude of a code of one byte, or of two: both bytes of 127 · 257, the low one
/// signed, fit a signed byte.
pub(super) const fn limit(bytes: usize) -> f32 {
    if bytes == 1 { 127.0 } else { 32_639.0 }
}
/// A block whose values are all at most this large counts as zeros, since the inverse of its scale
/// could overflow.
const SMALLEST: f32 = 1e-30;

/// 32 columns of a row.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct Rounded {
    /// The codes, in the order in which the instruction set's products read them.
    pub codes: [u8; 2 * BLOCK],
    pub scale: f32,
    /// Minus the sums of the codes: of the first half, of the second, of both.
    pub offsets: [i32; 3],
    /// The sums of the values that the codes stand for: of the first half, of the second, of both.
    pub sums: [f32; 3],
}

impl Rounded {
    pub(super) const ZERO: Self =
        Self { codes: [0; 2 * BLOCK], scale: 0.0, offsets: [0; 3], sums: [0.0; 3] };
}

/// The block's scale, and the factor by which its values are multiplied to give codes. If a value
/// is not finite, neither is the scale.
#[inline(always)]
pub(super) fn scale(largest: f32, limit: f32) -> (f32, f32) {
    (largest / limit, if largest > SMALLEST { limit / largest } else { 0.0 })
}

/// Rounds a block to codes of a magnitude of at most `limit`, and its scale.
#[inline(always)]
pub(super) fn round(x: &[f32; BLOCK], limit: f32) -> ([i16; BLOCK], f32) {
    /// 1.5 · 2^23: adding it rounds to an integer, ties to even, and leaves that in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // Without the sign bit, magnitudes compare as integers, and NaN is above all.
    let largest =
        f32::from_bits(x.iter().fold(0, |largest, x| largest.max(x.to_bits() & (u32::MAX >> 1))));
    let (scale, inverse) = scale(largest, limit);
    let code = |x: f32| (x * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i16;
    (x.map(code), scale)
}

impl Rounded {
    /// Makes a block from codes in the order of the products, and the codes' sums over the first
    /// half and the second.
    #[inline(always)]
    pub(super) fn new(codes: [u8; 2 * BLOCK], scale: f32, first: i32, second: i32) -> Self {
        let sums = [first, second, first + second];
        Self {
            codes,
            scale,
            offsets: sums.map(|sum| -sum),
            sums: sums.map(|sum| sum as f32 * scale),
        }
    }

    /// Rounds a block without special instructions; `arrange` brings the codes into order.
    #[inline(always)]
    pub(super) fn plain(
        x: &[f32; BLOCK],
        limit: f32,
        arrange: impl Fn(&[i16; BLOCK]) -> [u8; 2 * BLOCK],
    ) -> Self {
        let (codes, scale) = round(x, limit);
        let (first, second) = codes.split_at(BLOCK / 2);
        let sum = |half: &[i16]| half.iter().map(|code| i32::from(*code)).sum();
        Self::new(arrange(&codes), scale, sum(first), sum(second))
    }

    /// Rounds a block to codes of `bytes` bytes: their high bytes, then their low ones, which are
    /// signed.
    #[inline(always)]
    pub(super) fn split(x: &[f32; BLOCK], bytes: usize) -> Self {
        Self::plain(x, limit(bytes), |codes| {
            from_fn(|i| match i.checked_sub(BLOCK) {
                None => ((codes[i] + 128) >> 8) as u8,
                Some(i) => codes[i] as u8,
            })
        })
    }
}

//! Unpacks the blocks of the I-quants, MXFP4 and the ternary formats, as ggml defines them
//! (`ggml-common.h`).
//!
//! An I-quant of fewer than four bits names a point of a grid for every eight or four columns, and
//! perhaps the signs of their values. A panel has the number of each value instead: that takes more
//! memory than the file, and a product needs no look-up in a grid, which no cache line holds.
//!
//! `grids.bin` is made by `make_grids.py` of the tables of ggml (MIT licence, copyright 2023-2026
//! The ggml authors).

use super::WeightType;
use super::super_block::{SuperBlock, legacy, nibble, two_bits, u16_at};

const POINTS: usize = 4608;
static GRIDS: &[u8; 2 * POINTS] = include_bytes!("grids.bin");

/// A table of points, each with the values of `columns` columns.
struct CodeGrid {
    first: usize,
    columns: usize,
}

const IQ2XXS: CodeGrid = CodeGrid { first: 0, columns: 8 };
const IQ2XS: CodeGrid = CodeGrid { first: 256, columns: 8 };
const IQ2S: CodeGrid = CodeGrid { first: 768, columns: 8 };
const IQ1: CodeGrid = CodeGrid { first: 1792, columns: 8 };
const IQ3XXS: CodeGrid = CodeGrid { first: 3840, columns: 4 };
const IQ3S: CodeGrid = CodeGrid { first: 4096, columns: 4 };

impl CodeGrid {
    /// The numbers of a point's values: 0 to 2 for eight columns, 0 to 7 for four.
    fn point(&self, index: usize) -> impl Iterator<Item = u8> {
        let (word, bits) = (u16_at(GRIDS, 2 * (self.first + index)), 16 / self.columns);
        (0..self.columns).map(move |column| (word >> (column * bits)) as u8 & ((1 << bits) - 1))
    }

    /// Sets the codes of eight columns, whose values are negative where `signs` has a bit.
    fn place(&self, points: &[usize], signs: u8, codes: &mut [u8]) {
        let half = 32 / self.columns as u8;
        let numbers = points.iter().flat_map(|index| self.point(*index));
        for (i, (code, number)) in codes.iter_mut().zip(numbers).enumerate() {
            *code = signed(half, number, signs >> i & 1 == 1);
        }
    }
}

/// The code of the value with a number among `half` magnitudes: codes rise with the values.
fn signed(half: u8, number: u8, negative: bool) -> u8 {
    if negative { half - 1 - number } else { half + number }
}

/// The signs of eight values. The index has seven of them as bits; the eighth follows, because the
/// number of negative values is always even.
fn even_signs(index: u32) -> u8 {
    let seven = index as u8 & 127;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// The odd number that stands for a scale.
fn odd(scale: u32) -> u8 {
    2 * scale as u8 + 1
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from(u16_at(block, at)) | u32::from(u16_at(block, at + 2)) << 16
}

/// Scales of four bits, the first in the low half of a byte.
fn nibble_scales(bytes: &[u8], out: &mut SuperBlock) {
    for (i, scale) in out.scales[..2 * bytes.len()].iter_mut().enumerate() {
        *scale = odd(u32::from(nibble(bytes, i)));
    }
}

pub(super) fn unpack(dtype: WeightType, block: &[u8], out: &mut SuperBlock) {
    out.d = u16_at(block, 0);
    match dtype {
        WeightType::IQ4NL => legacy(block, 2, None, out),
        WeightType::IQ4XS => iq4_xs(block, out),
        WeightType::IQ3S => iq3_s(block, out),
        WeightType::IQ3XXS => iq3_xxs(block, out),
        WeightType::IQ2S => iq2_s(block, out),
        WeightType::IQ2XS => iq2_xs(block, out),
        WeightType::IQ2XXS => iq2_xxs(block, out),
        WeightType::IQ1S => iq1_s(block, out),
        WeightType::IQ1M => iq1_m(block, out),
        WeightType::MXFP4 => mxfp4(block, out),
        WeightType::TQ1_0 => tq1_0(block, out),
        WeightType::TQ2_0 => tq2_0(block, out),
        other => unreachable!("{other:?} has no block format"),
    }
}

/// The codes of eight columns each, with their index.
fn eights(out: &mut SuperBlock) -> impl Iterator<Item = (usize, &mut [u8; 8])> {
    out.codes.as_chunks_mut().0.iter_mut().enumerate()
}

/// `d, high bits of scales: u16, their low nibbles × 4, nibbles × 128`.
fn iq4_xs(block: &[u8], out: &mut SuperBlock) {
    let high = u16_at(block, 2);
    for (i, scale) in out.scales[..8].iter_mut().enumerate() {
        let two = (high >> (2 * i) & 3) as u8;
        *scale = (nibble(&block[4..8], i) | two << 4).wrapping_sub(32);
    }
    for (c, code) in out.codes.iter_mut().enumerate() {
        *code = block[8 + c / 32 * 16 + c % 16] >> (c % 32 / 16 * 4) & 15;
    }
}

/// `d, points × 64, their ninth bits, signs × 32, scales × 4`.
fn iq3_s(block: &[u8], out: &mut SuperBlock) {
    let (points, ninth, signs) = (&block[2..66], &block[66..74], &block[74..106]);
    nibble_scales(&block[106..110], out);
    for (i, codes) in eights(out) {
        let point =
            |k: usize| usize::from(points[k]) | usize::from(ninth[k / 8] >> (k % 8) & 1) << 8;
        IQ3S.place(&[point(2 * i), point(2 * i + 1)], signs[i], codes);
    }
}

/// `d, points × 64`, then a word for each 32 columns: four times the index of signs, and a scale.
fn iq3_xxs(block: &[u8], out: &mut SuperBlock) {
    let word = |group: usize| u32_at(block, 66 + 4 * group);
    for (i, codes) in eights(out) {
        let points = [2 + 2 * i, 3 + 2 * i].map(|at| usize::from(block[at]));
        IQ3XXS.place(&points, even_signs(word(i / 4) >> (i % 4 * 7)), codes);
    }
    for group in 0..8 {
        out.scales[group] = odd(word(group) >> 28);
    }
}

/// `d, points × 32, signs × 32, two more bits of the points × 8, scales × 8`.
fn iq2_s(block: &[u8], out: &mut SuperBlock) {
    nibble_scales(&block[74..82], out);
    for (i, codes) in eights(out) {
        let more = block[66 + i / 4] >> (i % 4 * 2) & 3;
        let point = usize::from(block[2 + i]) | usize::from(more) << 8;
        IQ2S.place(&[point], block[34 + i], codes);
    }
}

/// `d, (point in nine bits, index of signs) × 32, scales × 8`.
fn iq2_xs(block: &[u8], out: &mut SuperBlock) {
    nibble_scales(&block[66..74], out);
    for (i, codes) in eights(out) {
        let both = u16_at(block, 2 + 2 * i);
        IQ2XS.place(&[usize::from(both & 511)], even_signs(u32::from(both >> 9)), codes);
    }
}

/// `d`, then for each 32 columns `points × 4` and a word as in `iq3_xxs`.
fn iq2_xxs(block: &[u8], out: &mut SuperBlock) {
    let word = |group: usize| u32_at(block, 6 + 8 * group);
    for (i, codes) in eights(out) {
        let point = usize::from(block[2 + i / 4 * 8 + i % 4]);
        IQ2XXS.place(&[point], even_signs(word(i / 4) >> (i % 4 * 7)), codes);
    }
    for group in 0..8 {
        out.scales[group] = odd(word(group) >> 28);
    }
}

/// Sets the codes of eight columns: a value of the grid, which an eighth is added to or taken from.
fn place_ternary(point: usize, taken: bool, codes: &mut [u8]) {
    for (code, number) in codes.iter_mut().zip(IQ1.point(point)) {
        *code = 2 * number + u8::from(!taken);
    }
}

/// `d, points × 32`, then for each 32 columns three more bits of four points, a scale, and whether
/// the eighth is taken.
fn iq1_s(block: &[u8], out: &mut SuperBlock) {
    let word = |group: usize| u16_at(block, 34 + 2 * group);
    for (i, codes) in eights(out) {
        let more = word(i / 4) >> (i % 4 * 3) & 7;
        let point = usize::from(block[2 + i]) | usize::from(more) << 8;
        place_ternary(point, word(i / 4) >> 15 == 1, codes);
    }
    for group in 0..8 {
        out.scales[group] = odd(u32::from(word(group) >> 12 & 7));
    }
}

/// `points × 32`, nibbles × 32 of three more bits and whether the eighth is taken, and four words
/// of four scales each, whose highest nibbles make up `d`.
fn iq1_m(block: &[u8], out: &mut SuperBlock) {
    let word = |i: usize| u16_at(block, 48 + 2 * i);
    out.d = (0..4).fold(0, |d, i| d | word(i) >> 12 << (4 * i));
    for (i, scale) in out.scales.iter_mut().enumerate() {
        *scale = odd(u32::from(word(i / 4) >> (i % 4 * 3) & 7));
    }
    for (i, codes) in eights(out) {
        let more = nibble(&block[32..48], i);
        let point = usize::from(block[i]) | usize::from(more & 7) << 8;
        place_ternary(point, more >> 3 == 1, codes);
    }
}

/// `exponent, 16 bytes of nibbles`. The scale 2^(exponent - 128), with which the codes mean twice
/// their number, is a bf16; the lowest two are subnormal. A device takes the exponent itself.
fn mxfp4(block: &[u8], out: &mut SuperBlock) {
    out.scales[0] = block[0];
    let exponent = u16::from(block[0]);
    out.d = if exponent < 2 { 0x20 << exponent } else { (exponent - 1) << 7 };
    for (c, code) in out.codes[..32].iter_mut().enumerate() {
        let nibble = block[1 + c % 16] >> (c / 16 * 4) & 15;
        *code = signed(8, nibble & 7, nibble > 7);
    }
}

/// 52 bytes of which five digits to the base of three each, or four, belong to columns; then `d`.
fn tq1_0(block: &[u8], out: &mut SuperBlock) {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    for (c, code) in out.codes.iter_mut().enumerate() {
        let (at, digit) = match c {
            0..160 => (c % 32, c / 32),
            160..240 => (32 + c % 16, (c - 160) / 16),
            _ => (48 + c % 4, (c - 240) / 4),
        };
        let rest = block[at].wrapping_mul(POWERS[digit]);
        *code = ((u16::from(rest) * 3) >> 8) as u8;
    }
    out.d = u16_at(block, 52);
}

fn tq2_0(block: &[u8], out: &mut SuperBlock) {
    for (c, code) in out.codes.iter_mut().enumerate() {
        *code = two_bits(&block[..64], c);
    }
    out.d = u16_at(block, 64);
}

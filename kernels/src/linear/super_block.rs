//! The codes and scales of a block, and the reading that several types of blocks share.

use super::format::BLOCK;

/// Codes and scales of up to 256 columns of one row.
pub(super) struct SuperBlock {
    /// The bits of the header's scale: f16, or bf16 where the format says so.
    pub d: u16,
    /// The bits of the f16 that is added, multiplied by `mins` if there are any.
    pub m: u16,
    /// The scale in place of `d`, and the code that means zero, where the format has them.
    pub scale: f32,
    pub zero: u8,
    pub scales: [u8; 16],
    pub mins: [u8; 16],
    pub codes: [u8; 256],
}

pub(super) fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// Half a byte, the low halves first.
pub(super) fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (i % 2 * 4) & 15
}

/// `d [, m] [, 32 fifth bits], 16 bytes of nibbles` from `nibbles`.
pub(super) fn legacy(block: &[u8], nibbles: usize, fifth: Option<usize>, out: &mut SuperBlock) {
    out.d = u16_at(block, 0);
    out.m = u16_at(block, 2);
    for column in 0..BLOCK {
        let bit = fifth.map_or(0, |at| block[at + column / 8] >> (column % 8) & 1);
        let nibble = block[nibbles + column % 16] >> (column / 16 * 4) & 15;
        out.codes[column] = bit << 4 | nibble;
    }
}

/// Column `c`'s two bits of a plane that keeps four columns, 32 apart, in one byte.
pub(super) fn two_bits(plane: &[u8], c: usize) -> u8 {
    plane[c / 128 * 32 + c % 32] >> (c % 128 / 32 * 2) & 3
}

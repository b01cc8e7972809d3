//! Packs a tensor's blocks into panels. Each block type is first unpacked to codes and scales
//! (`SuperBlock`), then laid out by its `Format`. The layouts of GGUF's blocks are those of ggml's
//! definitions (`ggml-common.h`).

use super::format::{BLOCK, Format, HeaderScale, Scales};
use super::i_quants;
use super::super_block::{SuperBlock, legacy, nibble, two_bits, u16_at};
use crate::Compute;
use crate::linear::WeightType;
use crate::memory::RegionBytes;
use crate::simd::LANES;

/// Bytes of the scale with which the blocks of Hugging Face's formats begin.
pub(super) const SCALE_BYTES: usize = size_of::<f32>();

/// Panels of a dense matrix of `width` bytes an element, `[panel][col][16]`, and the bytes of one.
pub(super) fn dense(raw: &[u8], rows: usize, cols: usize, width: usize) -> (usize, RegionBytes) {
    let panel_bytes = cols * LANES * width;
    let mut data = RegionBytes::zeroed(rows.div_ceil(LANES) * panel_bytes);
    for (row, values) in raw.chunks_exact(cols * width).enumerate() {
        let lane = &mut data[row / LANES * panel_bytes + row % LANES * width..];
        let slots = lane.chunks_mut(LANES * width);
        for (slot, value) in slots.zip(values.chunks_exact(width)) {
            slot[..width].copy_from_slice(value);
        }
    }
    (panel_bytes, data)
}

/// Panels of a matrix of floats of eight bits, of which each `group` columns have a scale: for each
/// group `scale f32 × 16`, then `[col][16]`. The blocks are `scale f32`, then codes.
pub(super) fn scaled(raw: &[u8], rows: usize, cols: usize, group: usize) -> (usize, RegionBytes) {
    let (per_row, group_bytes) = (cols / group, LANES * (SCALE_BYTES + group));
    let panel_bytes = per_row * group_bytes;
    let mut data = RegionBytes::zeroed(rows.div_ceil(LANES) * panel_bytes);
    for (i, block) in raw.chunks_exact(SCALE_BYTES + group).enumerate() {
        let (row, lane) = (i / per_row, i / per_row % LANES);
        let at = row / LANES * panel_bytes + i % per_row * group_bytes;
        let (scales, slots) = data[at..at + group_bytes].split_at_mut(SCALE_BYTES * LANES);
        let (scale, codes) = block.split_at(SCALE_BYTES);
        scales[SCALE_BYTES * lane..][..SCALE_BYTES].copy_from_slice(scale);
        let slots = slots[lane..].iter_mut().step_by(LANES);
        slots.zip(codes).for_each(|(slot, code)| *slot = *code);
    }
    (panel_bytes, data)
}

/// Panels of a block-quantised matrix; `raw` holds `rows * cols / super_cols` blocks.
pub(super) fn quantised(
    c: &Compute,
    dtype: WeightType,
    f: &Format,
    raw: &[u8],
    rows: usize,
    cols: usize,
) -> RegionBytes {
    let row_bytes = cols / f.super_cols * dtype.type_size();
    let panel_bytes = f.panel_bytes(cols);
    let bytes = rows.div_ceil(LANES) * panel_bytes;
    RegionBytes::written(c, bytes, panel_bytes, |start, panel| {
        let mut unpacked = SuperBlock::EMPTY;
        let first = start / panel_bytes * LANES;
        let rows = raw.chunks_exact(row_bytes).skip(first).take(LANES);
        // The blocks of all rows side by side, because what they are written to stays in the
        // first-level cache.
        for (at, out) in panel.chunks_exact_mut(f.super_bytes()).enumerate() {
            for (lane, row) in rows.clone().enumerate() {
                unpack(dtype, &row[at * dtype.type_size()..][..dtype.type_size()], &mut unpacked);
                unpacked.place(f, lane, out);
            }
        }
    })
}

impl SuperBlock {
    pub(super) const EMPTY: Self =
        Self { d: 0, m: 0, scale: 0.0, zero: 0, scales: [0; 16], mins: [0; 16], codes: [0; 256] };

    fn place(&self, f: &Format, lane: usize, out: &mut [u8]) {
        if f.header == HeaderScale::F32 {
            out[SCALE_BYTES * lane..][..SCALE_BYTES].copy_from_slice(&self.scale.to_le_bytes());
        } else {
            out[2 * lane..][..2].copy_from_slice(&self.d.to_le_bytes());
        }
        if f.zeros {
            out[f.zeros_offset() + lane] = self.zero;
        }
        if f.min {
            out[2 * (LANES + lane)..][..2].copy_from_slice(&self.m.to_le_bytes());
        }
        let blocks = out[f.header_bytes()..].chunks_exact_mut(f.block_bytes());
        for (i, block) in blocks.enumerate() {
            let (groups, codes) = block.split_at_mut(f.codes_offset());
            self.place_scales(f, lane, i * BLOCK / f.group, groups);
            place_codes(f, lane, &self.codes[i * BLOCK..][..BLOCK], codes);
        }
    }

    fn place_scales(&self, f: &Format, lane: usize, first: usize, out: &mut [u8]) {
        if f.scales == Scales::Direct {
            return;
        }
        for (i, group) in out.chunks_exact_mut(f.group_bytes()).enumerate() {
            group[lane] = self.scales[first + i];
            if let Some(min) = group.get_mut(LANES + lane) {
                *min = self.mins[first + i];
            }
        }
    }
}

fn place_codes(f: &Format, lane: usize, codes: &[u8], out: &mut [u8]) {
    let (low, high) = out.split_at_mut(4 * LANES * f.low);
    place_plane(f.low, 0, lane, codes, low);
    if f.high > 0 {
        place_plane(f.high, f.low, lane, codes, high);
    }
}

/// Bits `from..from + bits` of the codes, as one output's words of a plane.
fn place_plane(bits: usize, from: usize, lane: usize, codes: &[u8], out: &mut [u8]) {
    match bits {
        1 => place_fields::<1>(from, lane, codes, out),
        2 => place_fields::<2>(from, lane, codes, out),
        4 => place_fields::<4>(from, lane, codes, out),
        _ => place_fields::<8>(from, lane, codes, out),
    }
}

/// Four columns are moved at once, by shifts that the compiler knows: four times as fast.
fn place_fields<const BITS: usize>(from: usize, lane: usize, codes: &[u8], out: &mut [u8]) {
    let mask = u32::from_ne_bytes([u8::MAX >> (8 - BITS); 4]);
    let words = out.chunks_exact_mut(4 * LANES);
    for (word, codes) in words.zip(codes.chunks_exact(32 / BITS)) {
        let fields =
            codes.as_chunks().0.iter().map(|four| u32::from_le_bytes(*four) >> from & mask);
        let packed = fields.enumerate().fold(0, |word, (i, four)| word | four << (i * BITS));
        word[4 * lane..][..4].copy_from_slice(&packed.to_le_bytes());
    }
}

pub(super) fn unpack(dtype: WeightType, block: &[u8], out: &mut SuperBlock) {
    match dtype {
        WeightType::Q4_0 => legacy(block, 2, None, out),
        WeightType::Q4_1 => legacy(block, 4, None, out),
        WeightType::Q5_0 => legacy(block, 6, Some(2), out),
        WeightType::Q5_1 => legacy(block, 8, Some(4), out),
        WeightType::Q8_0 => q8_0(block, out),
        WeightType::Q2K => q2_k(block, out),
        WeightType::Q3K => q3_k(block, out),
        WeightType::Q4K => k_nibbles(block, 16, None, out),
        WeightType::Q5K => k_nibbles(block, 48, Some(16), out),
        WeightType::Q6K => q6_k(block, out),
        WeightType::Int4By32
        | WeightType::Int4By64
        | WeightType::Int4By128
        | WeightType::Int8By32
        | WeightType::Int8By128 => integers(dtype.block_size(), block, out),
        WeightType::E4M3By32 | WeightType::E4M3By128 | WeightType::E5M2By32 => floats(block, out),
        other => i_quants::unpack(other, block, out),
    }
}

/// `scale f32, zero`, then codes of four bits, the first of two in the low half of a byte, or of
/// eight.
fn integers(columns: usize, block: &[u8], out: &mut SuperBlock) {
    let (scale, rest) = block.split_at(SCALE_BYTES);
    out.scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
    out.zero = rest[0];
    let codes = &rest[1..];
    for (i, code) in out.codes[..columns].iter_mut().enumerate() {
        *code = if codes.len() == columns { codes[i] } else { nibble(codes, i) };
    }
}

/// `scale f32`, then codes.
fn floats(block: &[u8], out: &mut SuperBlock) {
    let (scale, codes) = block.split_at(SCALE_BYTES);
    out.scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
    out.codes[..codes.len()].copy_from_slice(codes);
}

fn q8_0(block: &[u8], out: &mut SuperBlock) {
    out.d = u16_at(block, 0);
    for (code, signed) in out.codes.iter_mut().zip(&block[2..]) {
        *code = signed ^ 0x80;
    }
}

fn q2_k(block: &[u8], out: &mut SuperBlock) {
    out.scales.copy_from_slice(&block[..16]);
    for (c, code) in out.codes.iter_mut().enumerate() {
        *code = two_bits(&block[16..80], c);
    }
    out.d = u16_at(block, 80);
    out.m = negated(u16_at(block, 82));
}

fn q3_k(block: &[u8], out: &mut SuperBlock) {
    let (third_bits, two, scales) = (&block[..32], &block[32..96], &block[96..108]);
    for (c, code) in out.codes.iter_mut().enumerate() {
        *code = (third_bits[c % 32] >> (c / 32) & 1) << 2 | two_bits(two, c);
    }
    for (i, scale) in out.scales.iter_mut().enumerate() {
        let low = scales[i % 8] >> (i / 8 * 4) & 15;
        let high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        *scale = (high << 4 | low).wrapping_sub(32);
    }
    out.d = u16_at(block, 108);
}

/// `scales, [256 fifth bits,] 128 bytes of nibbles` from `nibbles`.
fn k_nibbles(block: &[u8], nibbles: usize, fifth: Option<usize>, out: &mut SuperBlock) {
    k_scales(block, out);
    let halves = out.codes.as_chunks_mut::<32>().0;
    for (i, codes) in halves.iter_mut().enumerate() {
        for (code, byte) in codes.iter_mut().zip(&block[nibbles + i / 2 * 32..]) {
            *code = byte >> (i % 2 * 4) & 15;
        }
        let Some(at) = fifth else { continue };
        for (code, byte) in codes.iter_mut().zip(&block[at..]) {
            *code |= (byte >> i & 1) << 4;
        }
    }
}

fn q6_k(block: &[u8], out: &mut SuperBlock) {
    for (i, codes) in out.codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let nibbles = &block[i / 4 * 64 + i % 2 * 32..];
        let two_bits = &block[128 + i / 4 * 32..];
        for ((code, nibble), bits) in codes.iter_mut().zip(nibbles).zip(two_bits) {
            *code = (bits >> (i % 4 * 2) & 3) << 4 | nibble >> (i % 4 / 2 * 4) & 15;
        }
    }
    out.scales.copy_from_slice(&block[192..208]);
    out.d = u16_at(block, 208);
}

/// `d, dmin`, then eight 6-bit scales and eight 6-bit minimums in twelve bytes.
fn k_scales(block: &[u8], out: &mut SuperBlock) {
    out.d = u16_at(block, 0);
    out.m = negated(u16_at(block, 2));
    let s = &block[4..16];
    for j in 0..4 {
        out.scales[j] = s[j] & 63;
        out.mins[j] = s[j + 4] & 63;
        out.scales[j + 4] = s[j + 8] & 15 | s[j] >> 6 << 4;
        out.mins[j + 4] = s[j + 8] >> 4 | s[j + 4] >> 6 << 4;
    }
}

/// The k-quants subtract their minimum.
fn negated(f16_bits: u16) -> u16 {
    f16_bits ^ 0x8000
}

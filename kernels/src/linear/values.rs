//! Reads one row back from its panel. Each value has exactly the bits that its format defines:
//! scale times code is exact in f32 for all formats of GGUF (11 bits of the header's and 13 of the
//! others at most), so adding the minimum rounds once; so does a scale in f32 times a code.

use super::format::{self, BLOCK, Format, HeaderScale, Scales};
use super::pack::SCALE_BYTES;
use super::weight::{Weight, WeightPart};
use crate::linear::WeightType;
use crate::simd::{E4M3_UNIT, LANES, e4m3, e5m2};
use half::{bf16, f16};

impl Weight {
    /// Dequantises one row (`out.len() == cols`): embedding look-up from a tied matrix.
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "a row has as many values as columns");
        let holds = |part: &&WeightPart| (part.first..part.first + part.rows).contains(&row);
        let part = self.parts.iter().find(holds).expect("invariant: the row is one of this matrix");
        self::row(part, row - part.first, out);
        if let Some(order) = &self.order {
            let stored = out.to_vec();
            for (input, value) in order.iter().zip(stored) {
                out[*input as usize] = value;
            }
        }
    }
}

/// `out.len()` is the number of columns.
fn row(part: &WeightPart, row: usize, out: &mut [f32]) {
    let (panel, lane) = (part.panels(row / LANES..row / LANES + 1), row % LANES);
    match (part.dtype, format::of(part.dtype)) {
        (_, Some(format)) => quantised(&format, panel, lane, out),
        (WeightType::E4M3By32 | WeightType::E4M3By128, None) => {
            scaled(panel, lane, part.dtype.block_size(), out, |code| e4m3(code) * E4M3_UNIT);
        }
        (WeightType::E5M2By32, None) => scaled(panel, lane, 32, out, e5m2),
        (WeightType::F32, None) => dense(panel, lane, out, f32::from_le_bytes),
        (WeightType::F16, None) => {
            dense(panel, lane, out, |bytes| f16::from_le_bytes(bytes).to_f32());
        }
        (_, None) => dense(panel, lane, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
    }
}

fn dense<const WIDTH: usize>(
    panel: &[u8],
    lane: usize,
    out: &mut [f32],
    value: impl Fn([u8; WIDTH]) -> f32,
) {
    let (elements, _) = panel.as_chunks::<WIDTH>();
    for (out, element) in out.iter_mut().zip(elements[lane..].iter().step_by(LANES)) {
        *out = value(*element);
    }
}

fn scaled(panel: &[u8], lane: usize, group: usize, out: &mut [f32], value: impl Fn(u8) -> f32) {
    let groups = panel.chunks_exact(LANES * (SCALE_BYTES + group));
    for (whole, out) in groups.zip(out.chunks_exact_mut(group)) {
        let (scales, codes) = whole.split_at(SCALE_BYTES * LANES);
        let scale = scales.as_chunks().0[lane];
        for (out, code) in out.iter_mut().zip(codes[lane..].iter().step_by(LANES)) {
            *out = value(*code) * f32::from_le_bytes(scale);
        }
    }
}

fn quantised(f: &Format, panel: &[u8], lane: usize, out: &mut [f32]) {
    for (header, out) in panel.chunks_exact(f.super_bytes()).zip(out.chunks_mut(f.super_cols)) {
        let (header, blocks) = header.split_at(f.header_bytes());
        let d = header_scale(f, &header[f.scale_bytes() * lane..]) * f.unit;
        let m = if f.min { header_scale(f, &header[2 * (LANES + lane)..]) } else { 0.0 };
        let zero = if f.zeros { header[f.zeros_offset() + lane].into() } else { f.zero };
        for (block, out) in blocks.chunks_exact(f.block_bytes()).zip(out.chunks_mut(BLOCK)) {
            let (groups, planes) = block.split_at(f.codes_offset());
            for (c, value) in out.iter_mut().enumerate() {
                let (scale, min) =
                    group_scale(f, &groups[c / f.group * f.group_bytes()..], lane, d, m);
                *value = (code(f, planes, lane, c) - zero) as f32 * scale + min;
            }
        }
    }
}

/// The number of a header with which `bytes` begins.
fn header_scale(f: &Format, bytes: &[u8]) -> f32 {
    match f.header {
        HeaderScale::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        HeaderScale::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        HeaderScale::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

fn group_scale(f: &Format, group: &[u8], lane: usize, d: f32, m: f32) -> (f32, f32) {
    let signed = |i: usize| f32::from(group[i].cast_signed());
    match f.scales {
        Scales::Direct => (d, m),
        Scales::Bytes => (d * signed(lane), if f.min { m * signed(LANES + lane) } else { m }),
        Scales::Nibbles => (d * f32::from(group[lane] & 15), m * f32::from(group[lane] >> 4)),
    }
}

fn code(f: &Format, planes: &[u8], lane: usize, column: usize) -> i32 {
    let field = |plane: &[u8], bits: usize| {
        let per_word = 32 / bits;
        let byte = plane[column / per_word * 4 * LANES + 4 * lane + column % 4];
        i32::from(byte >> (column % per_word / 4 * bits) & (u8::MAX >> (8 - bits)))
    };
    let low = field(planes, f.low);
    let high = if f.high == 0 { 0 } else { field(&planes[4 * LANES * f.low..], f.high) };
    let code = low | high << f.low;
    f.table.map_or(code, |table| i32::from(table[code as usize]))
}

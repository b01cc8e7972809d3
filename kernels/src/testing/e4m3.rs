//! The cache in floats of eight bits, as its layout is documented, in plain loops.

use half::bf16;

/// The value of a code, which is not NaN.
fn value(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if code >= 0x80 { -magnitude } else { magnitude }
}

/// The code whose value is nearest, and even where two are.
fn nearest(x: f32) -> u8 {
    let distance = |code: &u8| (value(*code) - x.abs()).abs();
    let least = (0..0x7f).map(|code| distance(&code)).fold(f32::INFINITY, f32::min);
    let found = (0..0x7f).filter(|code| distance(code) == least).min_by_key(|code| code % 2);
    found.unwrap_or(0x7e) | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// The scale and the codes of one head of a token. A value that is NaN makes the scale so.
fn coded(head: &[f32]) -> (bf16, Vec<u8>) {
    let largest = head.iter().fold(0f32, |most, x| if x.abs() <= most { most } else { x.abs() });
    let scale = if largest.is_nan() { largest } else { (largest * (1.0 / 448.0)).min(128.0) };
    let scale = bf16::from_f32(scale);
    let by = if scale > bf16::ZERO { 1.0 / scale.to_f32() } else { 0.0 };
    (scale, head.iter().map(|x| nearest(x * by)).collect())
}

/// The bytes of a cache of some slots, `[slots, kv_heads, dim]`.
pub fn e4m3_cache(slots: &[f32], kv_heads: usize, dim: usize, block_size: usize) -> Vec<u8> {
    let (mut codes, mut scales) = (Vec::new(), vec![bf16::ZERO; slots.len() / dim]);
    for (vector, head) in slots.chunks(dim).enumerate() {
        let (scale, own) = coded(head);
        for group in own.chunks(16) {
            codes.extend((0..16).map(|place| group[place % 2 * 8 + place / 2]));
        }
        let (slot, head) = (vector / kv_heads, vector % kv_heads);
        let row = slot / block_size * kv_heads + head;
        scales[row * block_size + slot % block_size] = scale;
    }
    codes.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
    codes
}

/// What is left of values when heads of `dim` become codes.
pub fn e4m3_rounded(values: &[f32], dim: usize) -> Vec<f32> {
    let rounded = |head: &[f32]| {
        let (scale, codes) = coded(head);
        codes.into_iter().map(move |code| value(code) * scale.to_f32()).collect::<Vec<_>>()
    };
    values.chunks(dim).flat_map(rounded).collect()
}

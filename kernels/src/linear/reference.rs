//! The specification: plain loops over the dequantised weights. Activations for integer codes are
//! rounded first.

use super::Weight;
use super::format::BLOCK;
use super::rounding::{limit, round};
use crate::simd::{E4M3_UNIT, e4m3};

/// Computes `x: [n, cols]` to `[n, rows]`, summed in f64 and rounded once. Inputs are put into the
/// order of the columns first.
pub fn linear(w: &Weight, bias: Option<&[f32]>, x: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; x.len() / w.cols() * w.rows()];
    let (x, mut weights) = (&w.gathered(x)[..], vec![0f32; w.cols()]);
    for part in &w.parts {
        let x = if part.rounds_activations() { &rounded(x) } else { x };
        for row in part.first..part.first + part.rows {
            w.row_f32(row, &mut weights);
            let weights = w.gathered(&weights);
            let bias = bias.map_or(0.0, |bias| f64::from(bias[row]));
            for (x, out) in x.chunks_exact(w.cols()).zip(out.chunks_exact_mut(w.rows())) {
                let products = x.iter().zip(&*weights).map(|(x, w)| f64::from(*x) * f64::from(*w));
                out[row] = (products.sum::<f64>() + bias) as f32;
            }
        }
    }
    out
}

/// Returns the values of the codes of whole blocks.
pub(super) fn rounded(x: &[f32]) -> Vec<f32> {
    let blocks = x.as_chunks::<BLOCK>().0.iter().map(|x| round(x, limit(2)));
    blocks.flat_map(|(codes, scale)| codes.map(|code| f32::from(code) * scale)).collect()
}

/// Rows of `cols` values in bf16, each rounded to the nearest number of E4M3, to the even code
/// among two, times the smallest power of two for which no value of the row is beyond 448, and
/// 2^-117 at least.
pub fn rounded_to_e4m3(x: &[f32], cols: usize) -> Vec<f32> {
    let numbers: Vec<f32> = (0..0x7f).map(|code| e4m3(code) * E4M3_UNIT).collect();
    let nearest = |x: f32| {
        let above = numbers.partition_point(|number| *number < x).min(numbers.len() - 1);
        let below = above.saturating_sub(1);
        let [far, near] = [numbers[above] - x, x - numbers[below]];
        let lower = near < far || (near == far && below % 2 == 0);
        numbers[if lower { below } else { above }]
    };
    let row = |x: &[f32]| {
        let largest = x.iter().fold(0f32, |most, x| most.max(x.abs()));
        let powers = (-117..=121).map(|power| 2f32.powi(power));
        let power = powers.into_iter().find(|power| largest <= 448.0 * power).unwrap_or(f32::NAN);
        x.iter().map(|x| nearest(x.abs() / power).copysign(*x) * power).collect::<Vec<f32>>()
    };
    x.chunks(cols).flat_map(row).collect()
}

//! The specification: plain loops over the dequantised weights. Activations for integer codes are
//! rounded first.

use super::Weight;
use super::format::BLOCK;
use super::rounding::round;

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
    let blocks = x.as_chunks::<BLOCK>().0.iter().map(round);
    blocks.flat_map(|(codes, scale)| codes.map(|code| f32::from(code) * scale)).collect()
}

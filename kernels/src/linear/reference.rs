//! The specification: plain loops over the dequantised weights.

use super::Weight;

/// `x: [n, cols]` to `[n, rows]`, summed in f64 and rounded once.
pub fn linear(w: &Weight, bias: Option<&[f32]>, x: &[f32]) -> Vec<f32> {
    let mut weights = vec![0f32; w.rows() * w.cols()];
    for (row, values) in weights.chunks_exact_mut(w.cols()).enumerate() {
        w.row_f32(row, values);
    }
    let dot = |x: &[f32], w: &[f32]| -> f64 {
        let products = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
        products.sum()
    };
    let add_bias = |row: usize| bias.map_or(0.0, |bias| f64::from(bias[row]));
    x.chunks_exact(w.cols())
        .flat_map(|x| {
            let rows = weights.chunks_exact(w.cols()).enumerate();
            rows.map(move |(row, w)| (dot(x, w) + add_bias(row)) as f32)
        })
        .collect()
}

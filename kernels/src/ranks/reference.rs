//! The specification, in plain loops over what all ranks have.

use crate::gpu::Rank;

/// `x[r]` is what rank r has.
pub fn all_reduce(x: &[Vec<f32>]) -> Vec<f32> {
    let mut sums = x[0].clone();
    for part in &x[1..] {
        for i in 0..sums.len() {
            sums[i] += part[i];
        }
    }
    sums
}

/// `parts[r]` is `[rows, columns of rank r]`.
pub fn gather_columns(parts: &[Vec<f32>], rows: usize, columns: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * columns];
    for (number, part) in parts.iter().enumerate() {
        let own = Rank { number, count: parts.len() }.share(columns);
        for row in 0..rows {
            for column in own.clone() {
                out[row * columns + column] = part[row * own.len() + column - own.start];
            }
        }
    }
    out
}

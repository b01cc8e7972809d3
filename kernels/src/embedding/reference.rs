//! The specification, in plain loops.

/// The rows of `table: [_, width]` that `ids` name, in order, every value times `scale`.
pub fn gather(table: &[f32], width: usize, ids: &[u32], scale: f32) -> Vec<f32> {
    let mut out = Vec::new();
    for &id in ids {
        for value in &table[id as usize * width..][..width] {
            out.push(value * scale);
        }
    }
    out
}

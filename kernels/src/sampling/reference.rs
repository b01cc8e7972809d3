//! The specification, in plain loops.

use super::gumbel_noise;

pub fn mass(row: &[f32]) -> f64 {
    row.iter().map(|x| f64::from(*x).exp()).sum()
}

pub fn gumbel_argmax(scaled: &[f32], seed: u64, position: u32) -> Option<u32> {
    let mut best: Option<(u32, f64)> = None;
    for (id, &x) in (0..).zip(scaled).filter(|(_, x)| **x > f32::NEG_INFINITY) {
        let value = f64::from(x) + gumbel_noise(seed, position, id);
        if best.is_none_or(|(_, most)| value > most) {
            best = Some((id, value));
        }
    }
    best.map(|(id, _)| id)
}

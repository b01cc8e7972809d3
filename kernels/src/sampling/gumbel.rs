//! Gumbel-max: the position of the largest `scaled + noise` is a draw from the softmax of `scaled`.
//!
//! The noise of id i is `-ln(-ln(1 - v))` with `v = (word + 1/2) / 2^32`, where `word` is number `i
//! % 4` of Philox4x32-10 with the seed as key (low word first) and the counter (`i / 4`, position,
//! 0, 0). Logarithms are taken in f64, and only for ids that a bound without a logarithm does not
//! rule out; the result is the same as if every one were computed.

use super::philox::{lanes, philox4x32};
use super::{Scan, first_equal, scan};
use crate::simd::{Isa, LANES, Lanes, vectorised};
use std::f64::consts::LN_2;

/// Ids whose random words come from one call of the generator: sixteen counters of four words.
const BLOCK: usize = 4 * LANES;

/// The noise of one id at one position.
pub fn gumbel_noise(seed: u64, position: u32, id: u32) -> f64 {
    let words = philox4x32([id / 4, position, 0, 0], key(seed));
    gumbel(words[id as usize % 4])
}

fn key(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

fn gumbel(word: u32) -> f64 {
    let v = (f64::from(word) + 0.5) / 4_294_967_296.0;
    -(-(-v).ln_1p()).ln()
}

/// The bound for the word 0, which no noise exceeds.
const MAX_NOISE: f64 = 33.0 * LN_2;

/// A bound that is at least `gumbel(word)` and needs no logarithm: `-ln(1 - v) >= v >= 2^-(zeros +
/// 1)` where `zeros` leading bits are 0.
fn bound(word: u32) -> f64 {
    f64::from(word.leading_zeros() + 1) * LN_2
}

/// The id of the largest `scaled[id] + noise`, the lower one among equals. Minus infinity is never
/// chosen; `None` if every value is minus infinity.
pub fn gumbel_argmax(scaled: &[f32], seed: u64, position: u32) -> Option<u32> {
    let Scan { max, .. } = scan(scaled);
    let likeliest = first_equal(scaled, max).filter(|_| max > f32::NEG_INFINITY)? as u32;
    // The search begins with the most likely id, so that the bound rules out most others.
    let value = f64::from(max) + gumbel_noise(seed, position, likeliest);
    let mut search = GumbelMax { key: key(seed), position, best: (likeliest, value) };
    consider_row(Isa::best(), scaled, &mut search);
    Some(search.best.0)
}

struct GumbelMax {
    key: [u32; 2],
    position: u32,
    /// The best id so far and its value.
    best: (u32, f64),
}

impl GumbelMax {
    #[inline(always)]
    fn consider_block(&mut self, first: usize, values: &[f32]) {
        let groups: [u32; LANES] = std::array::from_fn(|lane| (first / 4 + lane) as u32);
        let words = lanes([groups, [self.position; LANES], [0; LANES], [0; LANES]], self.key);
        for (i, &value) in values.iter().enumerate() {
            let word = words[i % 4][i / 4];
            if f64::from(value) + bound(word) >= self.best.1 {
                self.consider((first + i) as u32, f64::from(value) + gumbel(word));
            }
        }
    }

    fn consider(&mut self, id: u32, value: f64) {
        if value > self.best.1 || (value >= self.best.1 && id < self.best.0) {
            self.best = (id, value);
        }
    }
}

vectorised! { fn consider_row(scaled: &[f32], search: &mut GumbelMax) = consider_lanes }

#[inline(always)]
fn consider_lanes<L: Lanes>(scaled: &[f32], search: &mut GumbelMax) {
    let larger = |max: f32, &x: &f32| if x > max { x } else { max };
    for (index, block) in scaled.chunks(BLOCK).enumerate() {
        let max = block.iter().fold(f32::NEG_INFINITY, larger);
        if f64::from(max) + MAX_NOISE >= search.best.1 {
            search.consider_block(index * BLOCK, block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_above_the_noise() {
        for word in [0, 1, 2, 3, 1 << 16, u32::MAX / 3, u32::MAX - 1, u32::MAX] {
            assert!(gumbel(word).is_finite() && gumbel(word) <= bound(word), "{word}");
            assert!(bound(word) <= MAX_NOISE);
        }
    }
}

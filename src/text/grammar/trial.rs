//! Trials of a compiled format: what cannot be followed is refused before anything is computed for
//! it, and what cannot be followed cheaply as well.

use super::answer_format::FormatRefused;
use super::compile::CompiledGrammar;

/// Answers that are tried, tokens of each, and the work of one of them. The work of an ordinary
/// schema is a hundredth of it.
const TRIALS: u64 = 2;
const TOKENS: usize = 64;
const WORK: u64 = 400_000;

/// Begins a few answers with tokens that the format allows, other than these `ends`. The same are
/// tried everywhere.
pub(super) fn try_out(grammar: &CompiledGrammar, ends: &[u32]) -> Result<(), FormatRefused> {
    let mut trials = 0..TRIALS;
    trials.try_for_each(|seed| begin(grammar, ends, seed).map_err(|_| FormatRefused::costly()))
}

fn begin(grammar: &CompiledGrammar, ends: &[u32], seed: u64) -> Result<(), String> {
    let (place, mut answer, mut choice) = (grammar.start(), Vec::new(), seed);
    while answer.len() < TOKENS {
        let allowed = place.allowed_after(&answer)?;
        if place.work() > WORK {
            return Err("the trial costs more than it may".into());
        }
        choice = choice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let Some(token) = any_of(&allowed, ends, (choice >> 33) as usize) else { break };
        answer.push(token);
    }
    Ok(())
}

/// One of the tokens of a mask without the `ends`, counted around. `None`: there is none.
fn any_of(mask: &[u32], ends: &[u32], number: usize) -> Option<u32> {
    let mut mask = mask.to_vec();
    for id in ends {
        mask[*id as usize / 32] &= !(1 << (id % 32));
    }
    let count: usize = mask.iter().map(|word| word.count_ones() as usize).sum();
    let mut left = number.checked_rem(count)?;
    for (at, word) in mask.iter().enumerate() {
        let here = word.count_ones() as usize;
        if left < here {
            let bit = (0..32).filter(|bit| word >> bit & 1 == 1).nth(left)?;
            return Some(at as u32 * 32 + bit);
        }
        left -= here;
    }
    None
}

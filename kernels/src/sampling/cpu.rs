//! Samples a token for each row of logits: penalties, bias, temperature, top-k, top-p, min-p;
//! Gumbel-max on a counter-based generator keyed by (seed, position), so that a row's result
//! depends on nothing else.
//!
//! The order is fixed: the tokens that are allowed, repetition penalty, frequency and presence
//! penalties, bias, bans, temperature, top-k, top-p over what top-k left, min-p against the most
//! likely token. Equal values rank by id, the lower first. Nothing sorts the vocabulary.
//!
//! A draw can be repeated from the request's seed and the number of tokens before it: the token is
//! the one with the largest `(logit - largest) / temperature + noise` among those left, in f32 up
//! to the noise and in f64 from there; `noise` is [`gumbel_noise(seed, position,
//! id)`](super::gumbel_noise), whose definition stands there.

use super::params::{
    RowSampling, SampleError, SampleResult, Sampled, SamplingParams, TokenLogprobs,
};
use super::{Scan, above, first_equal, gumbel_argmax, mass, scale, scan};
use crate::error::ensure;
use crate::operand::{Operand, TensorView};
use crate::storage::read;
use crate::{Compute, Result};
use std::cmp::Ordering;
use std::sync::{Mutex, PoisonError};

/// A token with the value it is ranked by.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    value: f32,
}

impl Candidate {
    /// More likely first.
    fn rank(self, other: Self) -> Ordering {
        let by_value = other.value.total_cmp(&self.value);
        by_value.then(self.id.cmp(&other.id))
    }
}

/// Replaces the count of a token that has had its penalty, so that each has it once.
const DONE: u32 = u32::MAX;

/// Samples the rows of a step. It keeps the workspaces of the rows being sampled: as many as there
/// are threads.
#[derive(Default)]
pub struct RowSampler {
    idle: Mutex<Vec<Sampler>>,
}

impl RowSampler {
    /// Samples each row by itself, on any free thread. `logits` are `[rows, vocab_size]` f32.
    pub fn sample(
        &self,
        c: &Compute,
        logits: TensorView,
        rows: &[RowSampling],
    ) -> Result<Vec<SampleResult>> {
        const OP: &str = "sampling";
        let vocab_size = logits.len() / rows.len().max(1);
        ensure(OP, logits.len() == rows.len() * vocab_size, || {
            format!("{} logits of {} rows", logits.len(), rows.len())
        })?;
        let logits = read::<f32>(OP, logits)?;
        let mut results = vec![Err(SampleError::NotRun); rows.len()];
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        c.run_chunks(&mut results, 1, |i, result| {
            let mut sampler = idle().pop().unwrap_or_default();
            result[0] = sampler.sample(&logits[i * vocab_size..][..vocab_size], &rows[i]);
            idle().push(sampler);
        });
        Ok(results)
    }
}

/// Workspace for one row at a time.
#[derive(Debug, Default)]
pub struct Sampler {
    adjusted: Vec<f32>,
    counts: Vec<u32>,
    race: CandidateSet,
}

impl Sampler {
    /// Chooses the next token of a row, all of whose tokens are known. `logits`: `[vocab_size]`.
    pub fn sample(&mut self, logits: &[f32], row: &RowSampling) -> SampleResult {
        let Scan { max, finite } = scan(logits);
        if !finite {
            return Err(not_finite(logits));
        }
        let params = &row.params;
        let plain = !params.has_penalties()
            && params.logit_bias.is_empty()
            && row.banned.is_empty()
            && row.grammar.is_none();
        let token = if plain {
            self.race.choose(logits, max, row)?
        } else {
            self.adjust(logits, row)?;
            self.race.choose(&self.adjusted, scan(&self.adjusted).max, row)?
        };
        let logprobs =
            params.logprobs.map(|top| self.race.logprobs(logits, max, token, usize::from(top)));
        Ok(Sampled { token, logprobs })
    }

    /// Sets `adjusted` to the logits with penalties, bias and bans; that of a token which is banned
    /// or not allowed is minus infinity.
    fn adjust(&mut self, logits: &[f32], row: &RowSampling) -> Result<(), SampleError> {
        self.adjusted.clear();
        match row.mask().transpose()? {
            Some(allowed) => take_allowed(logits, &allowed, &mut self.adjusted),
            None => self.adjusted.extend_from_slice(logits),
        }
        if row.params.has_penalties() {
            self.penalise(row);
        }
        for &(token, bias) in row.params.logit_bias.iter() {
            let vocab_size = logits.len();
            *self
                .adjusted
                .get_mut(token as usize)
                .ok_or(SampleError::UnknownToken { token, vocab_size })? += bias;
        }
        for &token in row.banned.iter() {
            // An id outside the vocabulary cannot be chosen anyway.
            if let Some(logit) = self.adjusted.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn penalise(&mut self, row: &RowSampling) {
        let (prompt, output) = row.tokens.split_at(row.prompt_len);
        let vocab_size = self.adjusted.len();
        let in_vocabulary = |token: &&u32| (**token as usize) < vocab_size;
        self.counts.resize(vocab_size, 0);
        for &token in output.iter().filter(in_vocabulary) {
            self.counts[token as usize] += 1;
        }
        for &token in prompt.iter().chain(output).filter(in_vocabulary) {
            let count = std::mem::replace(&mut self.counts[token as usize], DONE);
            if count != DONE {
                let logit = &mut self.adjusted[token as usize];
                *logit = penalised(*logit, count, &row.params);
            }
        }
        for &token in row.tokens.iter().filter(in_vocabulary) {
            self.counts[token as usize] = 0;
        }
    }
}

/// Sets `taken` to the logits of the `allowed` tokens, with minus infinity for all others.
fn take_allowed(logits: &[f32], allowed: &[u32], taken: &mut Vec<f32>) {
    taken.resize(logits.len(), f32::NEG_INFINITY);
    for ((taken, logits), &word) in taken.chunks_mut(32).zip(logits.chunks(32)).zip(allowed) {
        if word == u32::MAX {
            taken.copy_from_slice(logits);
        } else if word != 0 {
            let each = taken.iter_mut().zip(logits).enumerate();
            each.filter(|(bit, _)| word >> bit & 1 == 1).for_each(|(_, (to, from))| *to = *from);
        }
    }
}

fn penalised(logit: f32, count: u32, params: &SamplingParams) -> f32 {
    let logit = if logit > 0.0 {
        logit / params.repetition_penalty
    } else {
        logit * params.repetition_penalty
    };
    let presence = if count > 0 { params.presence_penalty } else { 0.0 };
    logit - params.frequency_penalty * count as f32 - presence
}

fn not_finite(logits: &[f32]) -> SampleError {
    let token = logits.iter().position(|logit| !logit.is_finite()).unwrap_or_default();
    SampleError::NotFinite { token: token as u32, value: logits[token] }
}

/// Workspace for the tokens that can still be chosen.
#[derive(Debug, Default)]
struct CandidateSet {
    /// `[vocab_size]`; minus infinity for tokens that cannot.
    scaled: Vec<f32>,
    ids: Vec<u32>,
    candidates: Vec<Candidate>,
}

impl CandidateSet {
    /// The token of the largest of the `logits` (greedy), or a draw from the softmax of the tokens
    /// that the parameters leave.
    fn choose(&mut self, logits: &[f32], max: f32, row: &RowSampling) -> Result<u32, SampleError> {
        let params = &row.params;
        if max == f32::NEG_INFINITY {
            return Err(SampleError::NothingLeft);
        }
        if params.temperature <= 0.0 {
            return first_equal(logits, max).map(|id| id as u32).ok_or(SampleError::NothingLeft);
        }
        // Relative to the maximum, so that a tiny temperature cannot overflow.
        scale(logits, max, params.temperature, &mut self.scaled);
        if params.truncates() {
            self.truncate(params);
            self.keep_candidates();
        }
        gumbel_argmax(&self.scaled, params.seed, row.position() as u32)
            .ok_or(SampleError::NothingLeft)
    }

    /// Sets `candidates` to the tokens that top-k, top-p and min-p leave, in no order.
    fn truncate(&mut self, params: &SamplingParams) {
        let k = params.top_k as usize;
        let limited = (1..self.scaled.len()).contains(&k);
        if limited {
            self.collect(|found| found.len() >= k);
            keep_best(&mut self.candidates, k);
        }
        if params.top_p < 1.0 {
            let top_p = f64::from(params.top_p);
            let wanted =
                top_p * if limited { weight(&self.candidates) } else { mass(&self.scaled) };
            if !limited {
                self.collect(|found| weight(found) >= wanted);
            }
            keep_nucleus(&mut self.candidates, wanted);
        } else if !limited {
            self.collect_above(params.min_p.ln().max(f32::MIN));
        }
        if params.min_p > 0.0 {
            let threshold = params.min_p.ln();
            self.candidates.retain(|candidate| candidate.value >= threshold);
        }
    }

    /// Looks further and further below the largest until there are `enough` candidates, or all.
    fn collect(&mut self, enough: impl Fn(&[Candidate]) -> bool) {
        for reach in [4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 32.0, f32::MAX] {
            self.collect_above(-reach);
            if enough(&self.candidates) {
                break;
            }
        }
    }

    fn collect_above(&mut self, threshold: f32) {
        self.ids.clear();
        above(&self.scaled, threshold, &mut self.ids);
        let candidate = |&id: &u32| Candidate { id, value: self.scaled[id as usize] };
        self.candidates.clear();
        self.candidates.extend(self.ids.iter().map(candidate));
    }

    fn keep_candidates(&mut self) {
        self.scaled.fill(f32::NEG_INFINITY);
        for candidate in &self.candidates {
            self.scaled[candidate.id as usize] = candidate.value;
        }
    }

    /// Log-softmax of the raw logits, whose largest is `max`; sums and differences in f64.
    fn logprobs(&mut self, logits: &[f32], max: f32, token: u32, top: usize) -> TokenLogprobs {
        scale(logits, max, 1.0, &mut self.scaled);
        let log_total = mass(&self.scaled).ln();
        let logprob =
            |id: u32| (f64::from(logits[id as usize]) - f64::from(max) - log_total) as f32;
        self.collect(|found| found.len() >= top);
        // Tokens are ranked by the raw logits, because the differences to the largest may round two
        // values to one.
        self.candidates
            .iter_mut()
            .for_each(|candidate| candidate.value = logits[candidate.id as usize]);
        keep_best(&mut self.candidates, top);
        self.candidates.sort_unstable_by(|a, b| a.rank(*b));
        let top = self.candidates.iter().map(|candidate| (candidate.id, logprob(candidate.id)));
        TokenLogprobs { chosen: logprob(token), top: top.collect() }
    }
}

/// Keeps the `count` most likely, in no order.
fn keep_best(candidates: &mut Vec<Candidate>, count: usize) {
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, |a, b| a.rank(*b));
        candidates.truncate(count);
    }
}

/// Keeps the most likely candidates that together reach the `wanted` weight, at least one. Halves
/// the range in question instead of sorting it.
fn keep_nucleus(candidates: &mut Vec<Candidate>, wanted: f64) {
    // More than `low` are kept, and at most `high`; the weight of the first `low` is `before`.
    let (mut low, mut high, mut before) = (0, candidates.len(), 0.0);
    while high - low > 1 {
        let middle = usize::midpoint(low, high);
        candidates[low..high].select_nth_unstable_by(middle - low, |a, b| a.rank(*b));
        let upper = weight(&candidates[low..middle]);
        if before + upper >= wanted {
            high = middle;
        } else {
            (low, before) = (middle, before + upper);
        }
    }
    candidates.truncate(high);
}

fn weight(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| f64::from(candidate.value).exp()).sum()
}

#[cfg(test)]
mod tests;

//! From logits to a token, per row: penalties, bias, temperature, top-k, top-p, min-p; Gumbel-max on a counter-based generator
//! keyed by (seed, position), so that a row's result depends on nothing else.
//!
//! The order is fixed: repetition penalty, frequency and presence penalties, bias, bans, temperature, top-k, top-p over what
//! top-k left, min-p against the most likely token. Equal values rank by id, the lower first. Nothing sorts the vocabulary.

use super::philox::philox4x32;
use std::cmp::Ordering;
use std::f64::consts::LN_2;
use std::sync::Arc;

/// Sampling parameters of one request. Defaults sample from the plain distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    pub min_p: f32,
    /// Subtracted once per occurrence in the output.
    pub frequency_penalty: f32,
    /// Subtracted once if the token occurs in the output.
    pub presence_penalty: f32,
    /// 1 is off. Divides positive and multiplies negative logits of tokens in prompt or output.
    pub repetition_penalty: f32,
    pub seed: u64,
    pub logit_bias: Arc<[(u32, f32)]>,
    /// `Some(n)`: the chosen token's log-probability and those of the n most likely.
    pub logprobs: Option<u8>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            logit_bias: Arc::from([]),
            logprobs: None,
        }
    }
}

impl SamplingParams {
    fn has_penalties(&self) -> bool {
        self.frequency_penalty != 0.0 || self.presence_penalty != 0.0 || (self.repetition_penalty - 1.0).abs() > 0.0
    }

    fn truncates(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0
    }
}

/// Natural-log probabilities under the model's own distribution (before temperature, penalties and truncation).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    pub chosen: f32,
    /// Most likely first.
    pub top: Vec<(u32, f32)>,
}

/// What the sampler needs to know of one row.
#[derive(Clone, Debug)]
pub struct RowSampling {
    pub params: Arc<SamplingParams>,
    /// Prompt and output so far (penalties; its length is the position that keys the random numbers).
    pub tokens: Arc<Vec<u32>>,
    pub prompt_len: usize,
    /// Ids that must not be chosen (end-of-text before `min_tokens`).
    pub banned: Arc<[u32]>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: u32,
    pub logprobs: Option<TokenLogprobs>,
}

/// Why a row has no next token. It fails that row's sequence and no other.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    #[error("the model gave a logit of {value} for token {token}; its weights or its cache are damaged")]
    NotFinite { token: u32, value: f32 },
    #[error("logit_bias names token {token}, but the vocabulary has {vocab_size}; leave it out")]
    UnknownToken { token: u32, vocab_size: usize },
    #[error("every token is banned; lower min_tokens")]
    NothingLeft,
}

/// A token that may be chosen, with its logit relative to the largest, divided by the temperature.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    scaled: f32,
}

impl Candidate {
    /// More likely first.
    fn rank(self, other: Self) -> Ordering {
        let by_value = other.scaled.total_cmp(&self.scaled);
        by_value.then(self.id.cmp(&other.id))
    }
}

/// Stands in the counts for a token that has had its penalty, so that each has it once.
const DONE: u32 = u32::MAX;

/// Workspace for one row at a time.
#[derive(Debug, Default)]
pub struct Sampler {
    adjusted: Vec<f32>,
    counts: Vec<u32>,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// Chooses the next token of a row. `logits`: `[vocab_size]`.
    pub fn sample(&mut self, logits: &[f32], row: &RowSampling) -> Result<Sampled, SampleError> {
        check_finite(logits)?;
        let params = &row.params;
        let plain = !params.has_penalties() && params.logit_bias.is_empty() && row.banned.is_empty();
        let token = if plain {
            choose(logits, row, &mut self.candidates)?
        } else {
            self.adjust(logits, row)?;
            choose(&self.adjusted, row, &mut self.candidates)?
        };
        let logprobs = params.logprobs.map(|top| token_logprobs(logits, token, usize::from(top)));
        Ok(Sampled { token, logprobs })
    }

    /// `adjusted` becomes the logits with penalties, bias and bans; a banned token's is minus infinity.
    fn adjust(&mut self, logits: &[f32], row: &RowSampling) -> Result<(), SampleError> {
        self.adjusted.clear();
        self.adjusted.extend_from_slice(logits);
        if row.params.has_penalties() {
            self.penalise(row);
        }
        for &(token, bias) in row.params.logit_bias.iter() {
            let vocab_size = logits.len();
            *self.adjusted.get_mut(token as usize).ok_or(SampleError::UnknownToken { token, vocab_size })? += bias;
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

fn penalised(logit: f32, count: u32, params: &SamplingParams) -> f32 {
    let logit = if logit > 0.0 { logit / params.repetition_penalty } else { logit * params.repetition_penalty };
    let presence = if count > 0 { params.presence_penalty } else { 0.0 };
    logit - params.frequency_penalty * count as f32 - presence
}

fn check_finite(logits: &[f32]) -> Result<(), SampleError> {
    match logits.iter().position(|logit| !logit.is_finite()) {
        None => Ok(()),
        Some(token) => Err(SampleError::NotFinite { token: token as u32, value: logits[token] }),
    }
}

/// The token of the largest `logits` (greedy), or of the largest scaled logit plus Gumbel noise: a draw from the softmax.
fn choose(logits: &[f32], row: &RowSampling, candidates: &mut Vec<Candidate>) -> Result<u32, SampleError> {
    let (best, max) = argmax(logits).ok_or(SampleError::NothingLeft)?;
    let params = &row.params;
    if params.temperature <= 0.0 {
        return Ok(best);
    }
    let mut noise = GumbelNoise::new(params.seed, row.tokens.len());
    // Relative to the maximum, so that a tiny temperature cannot overflow.
    let scaled = logits
        .iter()
        .enumerate()
        .map(|(id, logit)| Candidate { id: id as u32, scaled: (logit - max) / params.temperature });
    let token = if params.truncates() {
        candidates.clear();
        candidates.extend(scaled.filter(|candidate| candidate.scaled > f32::NEG_INFINITY));
        truncate(candidates, params);
        noise.argmax(candidates.iter().copied())
    } else {
        noise.argmax(scaled)
    };
    Ok(token)
}

/// The largest value and its lowest id; `None` when nothing is above minus infinity.
fn argmax(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &logit) in logits.iter().enumerate() {
        if logit > best.1 {
            best = (id as u32, logit);
        }
    }
    (best.1 > f32::NEG_INFINITY).then_some(best)
}

fn truncate(candidates: &mut Vec<Candidate>, params: &SamplingParams) {
    let k = params.top_k as usize;
    if (1..candidates.len()).contains(&k) {
        candidates.select_nth_unstable_by(k - 1, |a, b| a.rank(*b));
        candidates.truncate(k);
    }
    if params.top_p < 1.0 {
        keep_nucleus(candidates, f64::from(params.top_p));
    }
    if params.min_p > 0.0 {
        let threshold = params.min_p.ln();
        candidates.retain(|candidate| candidate.scaled >= threshold);
    }
}

/// Keeps the most likely candidates that together reach `top_p` of the mass, at least one. Sorts only as far as needed.
fn keep_nucleus(candidates: &mut Vec<Candidate>, top_p: f64) {
    let weight = |candidate: &Candidate| f64::from(candidate.scaled).exp();
    let wanted = top_p * candidates.iter().map(weight).sum::<f64>();
    let mut mass = 0.0;
    let mut sorted = 0;
    while sorted < candidates.len() {
        let end = (sorted * 8).clamp(64, candidates.len().max(64));
        let end = end.min(candidates.len());
        let rest = &mut candidates[sorted..];
        if end - sorted < rest.len() {
            rest.select_nth_unstable_by(end - sorted, |a, b| a.rank(*b));
        }
        rest[..end - sorted].sort_unstable_by(|a, b| a.rank(*b));
        for index in sorted..end {
            mass += weight(&candidates[index]);
            if mass >= wanted {
                candidates.truncate(index + 1);
                return;
            }
        }
        sorted = end;
    }
}

/// Standard Gumbel noise per token id: `-ln(-ln(1 - v))`, `v = (word + 1/2) / 2^32`, where `word` is number `id % 4` of
/// Philox4x32-10 with the seed as key and the counter (`id / 4`, position, 0, 0).
struct GumbelNoise {
    key: [u32; 2],
    position: u32,
    /// The last `id / 4` and its words: ids mostly come in order.
    last: Option<(u32, [u32; 4])>,
}

impl GumbelNoise {
    fn new(seed: u64, position: usize) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], position: position as u32, last: None }
    }

    fn word(&mut self, id: u32) -> u32 {
        let group = id / 4;
        let words = match self.last {
            Some((last, words)) if last == group => words,
            _ => philox4x32([group, self.position, 0, 0], self.key),
        };
        self.last = Some((group, words));
        words[id as usize % 4]
    }

    /// Gumbel-max: the candidate with the largest `scaled + noise`, the lower id among equals.
    fn argmax(&mut self, candidates: impl Iterator<Item = Candidate>) -> u32 {
        let mut best = (0, f64::NEG_INFINITY);
        for Candidate { id, scaled } in candidates {
            let scaled = f64::from(scaled);
            if scaled + MOST_NOISE < best.1 {
                continue;
            }
            let word = self.word(id);
            if scaled + noise_bound(word) < best.1 {
                continue;
            }
            let value = scaled + gumbel(word);
            if value > best.1 || (value >= best.1 && id < best.0) {
                best = (id, value);
            }
        }
        best.0
    }
}

fn gumbel(word: u32) -> f64 {
    let v = (f64::from(word) + 0.5) / 4_294_967_296.0;
    -(-(-v).ln_1p()).ln()
}

/// The bound for the word 0: no noise is larger.
const MOST_NOISE: f64 = 33.0 * LN_2;

/// At least `gumbel(word)`, without a logarithm: `-ln(1 - v) >= v >= 2^-(zeros + 1)` where `zeros` leading bits are 0.
fn noise_bound(word: u32) -> f64 {
    f64::from(word.leading_zeros() + 1) * LN_2
}

/// Log-softmax of the raw logits, accumulated in f64.
fn token_logprobs(logits: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let (_, max) = argmax(logits).expect("invariant: a token was chosen, so there are logits");
    let shifted = |logit: f32| f64::from(logit) - f64::from(max);
    let log_total = logits.iter().map(|&l| shifted(l).exp()).sum::<f64>().ln();
    let logprob = |id: u32| (shifted(logits[id as usize]) - log_total) as f32;
    TokenLogprobs {
        chosen: logprob(token),
        top: most_likely(logits, top).into_iter().map(|id| (id, logprob(id))).collect(),
    }
}

/// The ids of the `count` largest logits, largest first. `count` is small: one pass with insertion.
fn most_likely(logits: &[f32], count: usize) -> Vec<u32> {
    let mut top: Vec<u32> = Vec::with_capacity(count + 1);
    for (id, &logit) in logits.iter().enumerate() {
        let full = top.len() == count;
        if full && top.last().is_none_or(|&last| logits[last as usize] >= logit) {
            continue;
        }
        let place = top.partition_point(|&other| logits[other as usize] >= logit);
        top.insert(place, id as u32);
        top.truncate(count);
    }
    top
}

#[cfg(test)]
mod tests;

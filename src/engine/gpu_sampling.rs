//! A row's sampling as the device wants it, and back. Pure.

use super::runner::RowResult;
use super::sampler::{RowSampling, SampleError, Sampled, TokenLogprobs};
use cresset_kernels::sampling::gpu::{Outcome, RowParams, Special};

/// What the device must know of a row; `pending` is the index, among the tokens of the step before, of one that only the device
/// knows and that stands behind `row.tokens`.
pub fn device_row(
    row: &RowSampling,
    pending: Option<u32>,
    vocab_size: usize,
) -> Result<(RowParams, Vec<Special>), SampleError> {
    let params = &row.params;
    let device = RowParams {
        temperature: params.temperature,
        top_p: params.top_p,
        top_k: params.top_k,
        min_p: params.min_p,
        frequency_penalty: params.frequency_penalty,
        presence_penalty: params.presence_penalty,
        repetition_penalty: params.repetition_penalty,
        seed: params.seed,
        position: row.tokens.len() as u32 + u32::from(pending.is_some()),
        logprobs: params.logprobs,
        pending: pending.filter(|_| params.has_penalties()),
    };
    Ok((device, specials(row, vocab_size)?))
}

/// What the row adds to single tokens' logits, by token.
fn specials(row: &RowSampling, vocab_size: usize) -> Result<Vec<Special>, SampleError> {
    let params = &row.params;
    if let Some(&(token, _)) = params.logit_bias.iter().find(|(token, _)| *token as usize >= vocab_size) {
        return Err(SampleError::UnknownToken { token, vocab_size });
    }
    let biased = |token, bias| Special { token, bias, output_count: 0, seen: false };
    let bias = params.logit_bias.iter().map(|&(token, bias)| biased(token, bias));
    let bans = row.banned.iter().map(|&token| biased(token, f32::NEG_INFINITY));
    let seen = first_that_counts(row)..row.tokens.len();
    let seen = seen.map(|at| Special {
        token: row.tokens[at],
        bias: 0.0,
        output_count: u32::from(at >= row.prompt_len),
        seen: true,
    });
    let mut specials: Vec<Special> = bias.chain(bans).chain(seen).collect();
    // An id outside the vocabulary cannot be chosen anyway.
    specials.retain(|special| (special.token as usize) < vocab_size);
    specials.sort_unstable_by_key(|special| special.token);
    specials.dedup_by(|next, kept| {
        let same = next.token == kept.token;
        if same {
            kept.bias += next.bias;
            kept.output_count += next.output_count;
            kept.seen |= next.seen;
        }
        same
    });
    Ok(specials)
}

/// Index of the first token that penalties look at.
fn first_that_counts(row: &RowSampling) -> usize {
    match &row.params {
        params if !params.has_penalties() => row.tokens.len(),
        params if params.repeats_freely() => row.prompt_len,
        _ => 0,
    }
}

pub fn row_result(outcome: Outcome) -> RowResult {
    match outcome {
        Outcome::Token { token, logprobs } => {
            let logprobs = logprobs.map(|(chosen, top)| TokenLogprobs { chosen, top });
            Ok(Sampled { token, logprobs })
        }
        Outcome::NotFinite => {
            Err("the model gave a logit that is not finite; its weights or its cache are damaged".into())
        }
        Outcome::NothingLeft => Err(SampleError::NothingLeft.to_string()),
    }
}

#[cfg(test)]
mod tests;

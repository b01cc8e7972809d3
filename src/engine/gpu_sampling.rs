//! A row's sampling as the device wants it, and back. Pure.

use super::error::EngineError;
use super::runner::RowResult;
use super::sampler::{SampleError, Sampled, TokenLogprobs};
use super::sampling_params::RowSampling;
use cresset_kernels::sampling::gpu::{Outcome, RowParams, Special};

/// What the device must know of a row beside its tokens, which it has.
pub fn device_row(
    row: &RowSampling,
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
        position: row.position() as u32,
        logprobs: params.logprobs,
        prompt_len: row.prompt_len as u32,
    };
    Ok((device, specials(row, vocab_size)?))
}

/// What the row adds to single tokens' logits, by token.
fn specials(row: &RowSampling, vocab_size: usize) -> Result<Vec<Special>, SampleError> {
    let params = &row.params;
    if let Some(&(token, _)) =
        params.logit_bias.iter().find(|(token, _)| *token as usize >= vocab_size)
    {
        return Err(SampleError::UnknownToken { token, vocab_size });
    }
    let bias = params.logit_bias.iter().map(|&(token, bias)| Special { token, bias });
    let bans = row.banned.iter().map(|&token| Special { token, bias: f32::NEG_INFINITY });
    // An id outside the vocabulary cannot be chosen anyway.
    let mut specials: Vec<_> =
        bias.chain(bans).filter(|special| (special.token as usize) < vocab_size).collect();
    specials.sort_unstable_by_key(|special| special.token);
    specials.dedup_by(|next, kept| {
        let same = next.token == kept.token;
        kept.bias += if same { next.bias } else { 0.0 };
        same
    });
    Ok(specials)
}

pub fn row_result(outcome: Outcome) -> RowResult {
    match outcome {
        Outcome::Token { token, logprobs } => {
            let logprobs = logprobs.map(|(chosen, top)| TokenLogprobs { chosen, top });
            Ok(Sampled { token, logprobs })
        }
        Outcome::NotFinite => {
            let text = "the model gave a logit that is not finite; its weights or its cache are \
                        damaged";
            Err(EngineError::Sampling(text.into()))
        }
        Outcome::NothingLeft => Err(SampleError::NothingLeft.into()),
    }
}

#[cfg(test)]
mod tests;

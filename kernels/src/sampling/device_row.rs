//! The sampling of a row in the form that the device takes. Pure.

use super::params::{RowSampling, SampleError, SamplingParams};
use std::sync::Arc;

/// The facts about a row that the device does not have: all but its tokens.
#[derive(Clone, Debug)]
pub struct DeviceRow {
    pub params: Arc<SamplingParams>,
    /// Tokens before the one to be drawn.
    pub position: u32,
    /// How many of its sequence's tokens are the prompt; the frequency and presence penalties count
    /// the later ones.
    pub prompt_len: u32,
    pub specials: Vec<Special>,
    /// Whether only some tokens may be drawn. Which ones is uploaded apart, because it may be known
    /// only when the row's logits are being computed already.
    pub masked: bool,
}

/// A token that a row treats differently from others: a value is added to its logit; minus infinity
/// bans it. A token has at most one entry per row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Special {
    pub token: u32,
    pub bias: f32,
}

impl DeviceRow {
    pub fn new(row: &RowSampling, vocab_size: usize) -> Result<Self, SampleError> {
        let (position, prompt_len) = (row.position() as u32, row.prompt_len as u32);
        let (specials, masked) = (specials(row, vocab_size)?, row.grammar.is_some());
        Ok(Self { params: row.params.clone(), position, prompt_len, specials, masked })
    }

    /// A greedy row, as padding rows are.
    pub fn greedy() -> Self {
        let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let (params, specials) = (Arc::new(params), Vec::new());
        Self { params, position: 0, prompt_len: 0, specials, masked: false }
    }
}

/// The row's additions to single tokens' logits, by token.
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

#[cfg(test)]
mod tests;

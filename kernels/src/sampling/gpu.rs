//! Sampling on a device: the same order of parameters and the same random numbers as on the CPU. `sampling.cu` says how.

use crate::gpu::{Gpu, Kind, Launch, View};
use crate::storage::ensure;
use crate::{Result, args};

/// Most log-probabilities of a row beside the chosen token's.
pub const MOST_TOP_LOGPROBS: usize = 20;

/// How one row is sampled; its meaning is that of the node's sampler (repetition penalty, frequency and presence penalties, bias, bans,
/// temperature, top-k, top-p over what is left, min-p; ties go to the lower id).
#[derive(Clone, Debug, PartialEq)]
pub struct RowParams {
    /// 0 is greedy.
    pub temperature: f32,
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    pub min_p: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    pub repetition_penalty: f32,
    pub seed: u64,
    /// Tokens before the one to be drawn, one that only the device knows included.
    pub position: u32,
    /// `Some(n)`: log-probabilities of the chosen token and of the n most likely.
    pub logprobs: Option<u8>,
    /// Index into `previous` of a token that belongs behind `counts`.
    pub pending: Option<u32>,
}

/// A token that a row treats otherwise: what is added to its logit (minus infinity bans it), how often it stands in the output, and
/// whether in prompt or output at all. At most one entry a token and row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Special {
    pub token: u32,
    pub bias: f32,
    pub output_count: u32,
    pub seen: bool,
}

pub struct Sample {
    /// `[rows, vocab_size]` f32; overwritten.
    pub logits: View,
    pub vocab_size: usize,
    /// What `encode` wrote, uploaded: u32.
    pub params: View,
    /// Tokens of the step before, u32; its length is free.
    pub previous: View,
    /// `[rows]` u32.
    pub tokens: View,
    /// `[rows, 2 + 2 * MOST_TOP_LOGPROBS]` u32: see `decode`.
    pub results: View,
    /// `workspace` bytes, u8.
    pub workspace: View,
}

/// Words that `encode` needs at most for so many rows with so many special tokens in all.
pub fn encoded_words(rows: usize, specials: usize) -> usize {
    let _ = (rows, specials);
    0
}

/// Writes the parameters of each row and its special tokens. Rows beyond those given (a graph's padding) are greedy.
pub fn encode(rows: &[(RowParams, Vec<Special>)], padded_rows: usize, words: &mut [u32]) {
    let _ = (rows, padded_rows, words);
}

pub fn workspace(rows: usize, vocab_size: usize) -> usize {
    let _ = (rows, vocab_size);
    0
}

/// One row's outcome.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Token {
        token: u32,
        /// Of the token, natural logarithm, under the model's own distribution; and the most likely, most likely first.
        logprobs: Option<(f32, Vec<(u32, f32)>)>,
    },
    /// A logit is NaN or infinite.
    NotFinite,
    /// Bans leave no token.
    NothingLeft,
}

/// Reads one row of `results`.
pub fn decode(result: &[u32], params: &RowParams) -> Outcome {
    let _ = (result, params);
    Outcome::NothingLeft
}

/// Rows of `tokens`; everything else is read on the device, so a recorded launch stays right.
pub fn sample(gpu: &dyn Gpu, args: &Sample) -> Result<()> {
    let _ = (gpu, args);
    Err(crate::Error::Unsupported { op: "sampling", detail: "the device path is being written".into() })
}

/// `cap * tanh(x / cap)` in place, f32. `soft_cap.cu` says how.
pub fn soft_cap(gpu: &dyn Gpu, logits: View, cap: f32) -> Result<()> {
    ensure("soft cap", logits.kind() == Kind::F32, || format!("{logits:?}"))?;
    if logits.is_empty() {
        return Ok(());
    }
    let blocks = [logits.len().div_ceil(1024) as u32, 1, 1];
    let launch = Launch { kernel: "soft_cap_f32", blocks, threads: 256, shared_bytes: 0 };
    gpu.launch(&launch, &args![logits, logits.len() as u64, cap])
}

#[cfg(test)]
mod tests;

//! The sampling parameters of a row and its result, for every path. Pure: it uses no tensors, so
//! the engine's scheduler may hold it.

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
    /// Whether the tokens so far change the logits.
    pub fn has_penalties(&self) -> bool {
        self.frequency_penalty != 0.0 || self.presence_penalty != 0.0 || !self.repeats_freely()
    }

    /// Whether tokens of the prompt are treated as any other.
    pub fn repeats_freely(&self) -> bool {
        (self.repetition_penalty - 1.0).abs() <= 0.0
    }

    /// Whether some tokens are excluded from the draw.
    pub fn truncates(&self) -> bool {
        self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0
    }
}

/// Everything that the sampling of one row depends on, beside its logits.
#[derive(Clone, Debug)]
pub struct RowSampling {
    pub params: Arc<SamplingParams>,
    /// Prompt and output, without tokens that the host does not have yet.
    pub tokens: Arc<Vec<u32>>,
    /// Which of the previous step's results follows `tokens`, if one does. Penalties count it too.
    pub pending: Option<u32>,
    pub prompt_len: usize,
    /// Ids that must not be chosen (end-of-text before `min_tokens`).
    pub banned: Arc<[u32]>,
}

impl RowSampling {
    /// The position of the token to choose in its sequence. It keys the random numbers.
    pub fn position(&self) -> usize {
        self.tokens.len() + usize::from(self.pending.is_some())
    }
}

/// Natural-log probabilities under the model's own distribution (before temperature, penalties and
/// truncation).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    pub chosen: f32,
    /// Most likely first.
    pub top: Vec<(u32, f32)>,
}

/// A row's next token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: u32,
    pub logprobs: Option<TokenLogprobs>,
}

/// Why a row has no next token. It fails that row's sequence and no other.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    #[error(
        "the model gave a logit of {value} for token {token}; its weights or its cache are damaged"
    )]
    NotFinite { token: u32, value: f32 },
    /// Like `NotFinite`, from a device, which does not tell which logit it is.
    #[error("the model gave a logit that is not finite; its weights or its cache are damaged")]
    SomeNotFinite,
    #[error("logit_bias names token {token}, but the vocabulary has {vocab_size}; leave it out")]
    UnknownToken { token: u32, vocab_size: usize },
    #[error("every token is banned; lower min_tokens")]
    NothingLeft,
    /// The row's task did not run.
    #[error("the row was not sampled")]
    NotRun,
}

/// The result of sampling one row.
pub type SampleResult = Result<Sampled, SampleError>;

//! The sampling parameters of a row and its result, for every path. Pure: it uses no tensors, so
//! the engine's scheduler may hold it.

use self::NumberField::{Count, Real, RealAbove};
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

/// The unit of a sampling number, and where its values are kept.
#[derive(Clone, Copy, Debug)]
pub enum NumberField {
    Real(fn(&mut SamplingParams) -> &mut f32),
    /// A real number that may come near its least value but not be it.
    RealAbove(fn(&mut SamplingParams) -> &mut f32),
    /// A whole number; a negative one stands for 0.
    Count(fn(&mut SamplingParams) -> &mut u32),
}

/// A number of `SamplingParams` that clients may set, each by its own name.
#[derive(Clone, Copy, Debug)]
pub struct SamplingNumber {
    pub name: &'static str,
    /// The text for clients that goes beyond the name and the range.
    pub about: Option<&'static str>,
    pub least: f64,
    pub most: f64,
    /// Whether a release may have a default of its own.
    pub in_releases: bool,
    pub field: NumberField,
}

const fn number(
    name: &'static str,
    [least, most]: [f64; 2],
    in_releases: bool,
    field: NumberField,
) -> SamplingNumber {
    SamplingNumber { name, about: None, least, most, in_releases, field }
}

const TOP_K: SamplingNumber = SamplingNumber {
    about: Some("Only the most likely so many tokens are drawn from. 0 and -1 switch it off."),
    ..number("top_k", [-1.0, u32::MAX as f64], true, Count(|params| &mut params.top_k))
};

/// The one list of these numbers. The parser and the schema of requests and the defaults of
/// releases all come from it; the value of a number that nobody sets is that of
/// `SamplingParams::default`.
pub static SAMPLING_NUMBERS: [SamplingNumber; 7] = [
    number("temperature", [0.0, 2.0], true, Real(|params| &mut params.temperature)),
    number("top_p", [0.0, 1.0], true, RealAbove(|params| &mut params.top_p)),
    TOP_K,
    number("min_p", [0.0, 1.0], true, Real(|params| &mut params.min_p)),
    number("frequency_penalty", [-2.0, 2.0], false, Real(|params| &mut params.frequency_penalty)),
    number("presence_penalty", [-2.0, 2.0], false, Real(|params| &mut params.presence_penalty)),
    // Logits are divided by the penalty. A smaller one would push them beyond f32, and a request
    // could make its own generation fail.
    number("repetition_penalty", [0.01, 2.0], true, Real(|params| &mut params.repetition_penalty)),
];

impl SamplingNumber {
    /// Whether the number may have this value.
    pub fn allows(&self, value: f64) -> bool {
        let Self { least, most, .. } = *self;
        match self.field {
            // Compared as f32, because 0.01 read as f32 is less than 0.01.
            Real(_) => (least as f32..=most as f32).contains(&(value as f32)),
            RealAbove(_) => value > least && value <= most,
            Count(_) => (least..=most).contains(&value) && value.fract().abs() <= 0.0,
        }
    }

    /// Sets the number, also to a value that is not allowed, which is refused later.
    pub fn set(&self, params: &mut SamplingParams, value: f64) {
        match self.field {
            Real(field) => *field(params) = value as f32,
            // However little it is above, f32 must tell it from the least value.
            RealAbove(field) if value > self.least => {
                *field(params) = (value as f32).max(self.least as f32 + f32::MIN_POSITIVE);
            }
            RealAbove(field) => *field(params) = value as f32,
            Count(field) => *field(params) = value.max(0.0) as u32,
        }
    }

    pub fn get(&self, params: &SamplingParams) -> f64 {
        // A copy, because `field` gives a reference that may be written to.
        let mut params = params.clone();
        match self.field {
            Real(field) | RealAbove(field) => f64::from(*field(&mut params)),
            Count(field) => f64::from(*field(&mut params)),
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
    /// Tells the only ids that may be chosen. `None` allows all.
    pub grammar: Option<Arc<dyn TokenMask>>,
}

/// The grammar that a sequence's output keeps to. It is asked where rows are sampled, so that the
/// threads of a step share the work.
pub trait TokenMask: std::fmt::Debug + Send + Sync {
    /// The ids that may follow `output`, which only grows from call to call, as bits: id `i` is bit
    /// `i % 32` of word `i / 32`, and ids beyond the last word may not. An error says why the
    /// grammar cannot be followed any further.
    fn allowed_after(&self, output: &[u32]) -> Result<Arc<[u32]>, String>;
}

/// What a row's grammar said of its next token, if the row has one.
pub type RowMask = Option<Result<Arc<[u32]>, SampleError>>;

impl RowSampling {
    /// The position of the token to choose in its sequence. It keys the random numbers.
    pub fn position(&self) -> usize {
        self.tokens.len() + usize::from(self.pending.is_some())
    }

    /// Whether the row's grammar cannot be asked yet, because a token before is not known.
    pub fn awaits_mask(&self) -> bool {
        self.grammar.is_some() && self.pending.is_some()
    }

    /// Asks the row's grammar, if there is one. All tokens before must be known.
    pub fn mask(&self) -> RowMask {
        let grammar = self.grammar.as_ref()?;
        let allowed = grammar.allowed_after(&self.tokens[self.prompt_len..]);
        Some(allowed.map_err(SampleError::Grammar))
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
    /// The grammar cannot be followed any further. The model is not at fault.
    #[error("{0}")]
    Grammar(String),
    /// The row's task did not run.
    #[error("the row was not sampled")]
    NotRun,
}

/// The result of sampling one row.
pub type SampleResult = Result<Sampled, SampleError>;

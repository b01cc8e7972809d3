//! What a client asks of a generation.

use super::error::RequestError;
use cresset_base::ModelId;
use cresset_engine::{SAMPLING_NUMBERS, SamplingParams};
use cresset_text::{
    AnswerFormat, ChatMessage, RawPrompt, TextModel, ThinkingEffort, ToolDefinition,
};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The generation that a client asks for, within every bound that does not depend on the model.
#[derive(Clone, Debug, Default)]
pub struct GenerationInput {
    /// A request without a model is refused as one for a model that does not exist.
    pub model: Option<ModelId>,
    pub messages: Vec<ChatMessage>,
    /// What the model gets in place of a conversation, without its chat template.
    pub raw: Option<RawPrompt>,
    /// The last message is the assistant's, and the answer goes on with its text.
    pub continues: bool,
    pub stream: bool,
    pub max_tokens: Option<u32>,
    pub min_tokens: u32,
    pub ignore_eos: bool,
    pub stop: Vec<String>,
    pub sampling: SamplingOverrides,
    /// What the answer keeps to.
    pub format: Option<AskedFormat>,
    /// Tools, or what is wrong with their definitions: that is told of a model that has tools only.
    pub tools: Option<Result<AskedTools, RequestError>>,
    /// Variables for the model's template.
    pub template_variables: Map<String, Value>,
    pub effort: Option<ThinkingEffort>,
    /// `max_tokens` becomes what is left, and switches of thinking that the model does not have are
    /// left out.
    pub is_lenient: bool,
}

impl GenerationInput {
    /// Refuses a request whose `min_tokens` is above `max_tokens`.
    pub fn check_min_tokens(&self, max_tokens: u32) -> Result<(), RequestError> {
        if self.min_tokens > max_tokens {
            return Err(RequestError::MinTokensAboveMax { max_tokens });
        }
        Ok(())
    }

    /// The ids that end the answer.
    pub fn ends<'a>(&self, text: &'a TextModel) -> &'a [u32] {
        match &self.raw {
            _ if self.ignore_eos => &[],
            Some(_) => &text.raw_eos_ids,
            None => &text.eos_ids,
        }
    }
}

/// The sampling parameters that the client set; the release's defaults fill the others.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOverrides {
    /// Values of `SAMPLING_NUMBERS`, by name, within their ranges.
    pub numbers: BTreeMap<&'static str, f64>,
    pub seed: Option<u64>,
    pub logit_bias: Vec<(u32, f32)>,
    pub logprobs: Option<u8>,
}

impl SamplingOverrides {
    pub fn resolve(&self, defaults: &SamplingParams, fresh_seed: u64) -> SamplingParams {
        let mut params = SamplingParams {
            seed: self.seed.unwrap_or(fresh_seed),
            logit_bias: self.logit_bias.as_slice().into(),
            logprobs: self.logprobs,
            ..defaults.clone()
        };
        for number in &SAMPLING_NUMBERS {
            if let Some(value) = self.numbers.get(number.name) {
                number.set(&mut params, *value);
            }
        }
        params
    }
}

/// A format, and the field of the request that asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedFormat {
    pub field: &'static str,
    pub format: AnswerFormat,
}

/// The tools that a request offers, and how they may be used.
#[derive(Clone, Debug, PartialEq)]
pub struct AskedTools {
    pub definitions: Vec<ToolDefinition>,
    /// The definitions as templates read them.
    pub shown: Value,
    pub choice: ToolChoice,
    /// Whether one answer may have several calls.
    pub parallel: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    Auto,
    /// The model is not told of the tools.
    None,
    Required,
    /// The place of the function in the definitions.
    Named(usize),
}

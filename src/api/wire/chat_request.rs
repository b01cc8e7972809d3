//! Reads the body of `POST /v1/chat/completions`: fields that have an effect, fields that are
//! accepted without one, and refusals of all others.

use super::answer_format;
use super::chat_schema::{body_members, check, only};
use super::json::{JsonField, JsonTree};
use super::messages;
use super::near_names::meant_by;
use super::raw_prompt;
use super::tools;
use crate::error::ApiError;
use crate::settings::ChatBounds;
use cresset_base::{ModelId, hyphenated};
use cresset_engine::{NumberField, SAMPLING_NUMBERS};
use cresset_request::{AskedFormat, GenerationInput};
use cresset_text::ThinkingEffort;
use serde_json::{Map, Value};

/// A request within every bound that does not depend on the model.
#[derive(Clone, Debug, Default)]
pub struct ChatRequest {
    pub input: GenerationInput,
    pub include_usage: bool,
    /// Paths of fields that were accepted and have no effect.
    pub ignored: Vec<String>,
    /// `max_completion_tokens`, until it was compared with `max_tokens`.
    max_completion_tokens: Option<u32>,
    logprobs: bool,
    top_logprobs: Option<u8>,
    /// The member that asks for the last message to be continued.
    continued_by: Option<String>,
    /// `guided_whitespace_pattern`, until the format is known.
    white_space: Option<String>,
}

impl ChatRequest {
    /// Reads a request within the bounds of `/v1`.
    pub fn parse(tree: &JsonTree) -> Result<Self, ApiError> {
        Self::parse_within(tree, &ChatBounds::new())
    }

    pub fn parse_within(tree: &JsonTree, bounds: &ChatBounds) -> Result<Self, ApiError> {
        let JsonTree::Object(_) = tree else {
            return Err(ApiError::malformed("The body must be a JSON object."));
        };
        let mut request = Self::default();
        let members = JsonField { path: String::new(), value: tree, bounds }.members()?;
        for (name, field) in &members {
            if *name == raw_prompt::NAME && raw_prompt::is_taken(bounds) {
                request.input.raw = Some(raw_prompt::parse(field)?);
                continue;
            }
            let known = body_members().as_object().and_then(|all| all.get_key_value(*name));
            let (name, schema) = known.ok_or_else(|| refusal(name, field))?;
            check(schema, field, &mut request.ignored)?;
            request.take(name, field)?;
        }
        request.input.tools = tools::read(&members, &mut request.ignored)?;
        request.check()
    }

    /// Takes the effect of a checked member. `tools::read` takes those that are not here, if they
    /// have one.
    fn take(&mut self, name: &'static str, field: &JsonField) -> Result<(), ApiError> {
        let input = &mut self.input;
        let sampling = &mut input.sampling;
        let it = field.value;
        match name {
            "model" => input.model = hyphenated(it.text()).map(ModelId),
            "messages" => {
                input.messages = messages::parse(field, &mut self.ignored)?;
                self.continued_by = messages::prefix(field)?.or(self.continued_by.take());
            }
            "continue_final_message" if it.is_true() => self.continued_by = Some(name.to_owned()),
            "stream" => input.stream = it.is_true(),
            "max_tokens" => input.max_tokens = Some(it.number()),
            "max_completion_tokens" => self.max_completion_tokens = Some(it.number()),
            "min_tokens" => input.min_tokens = it.number(),
            "ignore_eos" => input.ignore_eos = it.is_true(),
            "stop" => input.stop = it.texts(),
            "stream_options" => self.include_usage = it.get("include_usage").is_true(),
            "logprobs" => self.logprobs = it.is_true(),
            "top_logprobs" => self.top_logprobs = Some(it.number()),
            "response_format" | "structured_outputs" | "guided_json" | "guided_regex"
            | "guided_choice" | "guided_grammar" | "json_schema" | "regex" | "ebnf" | "grammar"
            | "structural_tag" => self.format(name, field)?,
            "guided_whitespace_pattern" => self.white_space = Some(it.text().to_owned()),
            "chat_template_kwargs" => input.template_variables = template_variables(field)?,
            "reasoning_effort" => input.effort = ThinkingEffort::of(it.text()),
            "seed" => sampling.seed = Some(it.number::<i64>() as u64),
            "logit_bias" => sampling.logit_bias = logit_bias(field)?,
            "functions" => self.functions(field)?,
            _ => {
                let number = SAMPLING_NUMBERS.iter().find(|number| number.name == name);
                sampling.numbers.extend(number.map(|number| match number.field {
                    NumberField::Count(_) => (name, it.number::<i64>() as f64),
                    _ => (name, it.number()),
                }));
            }
        }
        Ok(())
    }

    fn format(&mut self, name: &'static str, field: &JsonField) -> Result<(), ApiError> {
        let Some(format) = answer_format::parse(name, field, &mut self.ignored)? else {
            self.ignored.push(name.to_owned());
            return Ok(());
        };
        only(field, self.input.format.is_none(), "is the second format of this request; send one")?;
        self.input.format = Some(AskedFormat { field: name, format });
        Ok(())
    }

    /// The tools of older clients are bounded before they are refused; only an empty list passes.
    fn functions(&mut self, field: &JsonField) -> Result<(), ApiError> {
        let items = tools::items(field)?;
        only(field, items.is_empty(), "is not supported: send tools to a model that has them")?;
        self.ignored.push(field.path.clone());
        Ok(())
    }

    /// Checks the rules between fields, once all are read.
    fn check(mut self) -> Result<Self, ApiError> {
        let missing = |name: &str| Err(ApiError::invalid(name, format!("{name} is required.")));
        let input = &mut self.input;
        if input.model.is_none() {
            return missing("model");
        }
        if input.raw.is_some() {
            raw_prompt::check(input, &mut self.ignored)?;
        } else if input.messages.is_empty() {
            return missing("messages");
        }
        if input.max_tokens.zip(self.max_completion_tokens).is_some_and(|(a, b)| a != b) {
            return Err(ApiError::invalid(
                "max_completion_tokens",
                "max_completion_tokens and max_tokens must agree.",
            ));
        }
        input.max_tokens = input.max_tokens.or(self.max_completion_tokens);
        if let Some(max_tokens) = input.max_tokens {
            input.check_min_tokens(max_tokens)?;
        }
        if let Some(pattern) = &self.white_space {
            let name = "guided_whitespace_pattern";
            let format = input.format.as_mut().map(|asked| &mut asked.format);
            if !format.is_some_and(|format| answer_format::with_white_space(format, pattern)) {
                return Err(ApiError::invalid(name, format!("{name} goes with a JSON schema.")));
            }
        }
        let format = input.format.as_ref().map(|asked| asked.field);
        let tools = input.tools.as_ref().map(|_| "tools");
        if let Some((format, _)) = format.zip(tools) {
            let why =
                format!("{format} and tools both decide what an answer is: send one of them.");
            return Err(ApiError::invalid(format, why));
        }
        let endless = input.ignore_eos || input.min_tokens > 0;
        if let Some(field) = format.or(tools).filter(|_| endless) {
            let why = format!(
                "{field} decides where the answer ends: leave out ignore_eos and min_tokens."
            );
            return Err(ApiError::invalid(field, why));
        }
        if self.top_logprobs.is_some() && !self.logprobs {
            return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs: true."));
        }
        input.sampling.logprobs = self.logprobs.then(|| self.top_logprobs.unwrap_or(0));
        if let Some(field) = &self.continued_by {
            check_continued(input, field)?;
            input.continues = true;
        }
        Ok(self)
    }
}

/// Refuses to go on with a last message that has no text to go on with, as `field` asks.
fn check_continued(input: &GenerationInput, field: &str) -> Result<(), ApiError> {
    let refuse = |field: &str, why: &str| Err(ApiError::invalid(field, format!("{field} {why}.")));
    let place = input.messages.len().saturating_sub(1);
    let Some(last) = input.messages.last().filter(|last| last.role == "assistant") else {
        return refuse(field, "needs a last message of the assistant, which it continues");
    };
    if last.tool_calls.is_some() {
        let why = "cannot be continued: send what the tools answered";
        return refuse(&format!("messages[{place}].tool_calls"), why);
    }
    if last.content.as_deref().unwrap_or_default().trim().is_empty() {
        let why = "is empty, so nothing is to be continued: leave the message out";
        return refuse(&format!("messages[{place}].content"), why);
    }
    match &input.format {
        Some(asked) => {
            refuse(asked.field, "is of whole answers, and the last message begins one: send one")
        }
        None => Ok(()),
    }
}

fn refusal(name: &str, field: &JsonField) -> ApiError {
    match name {
        "cache_salt" | "cache_namespace" | "prompt_cache_key" => {
            field.refuse("cannot be chosen by the caller")
        }
        _ => match meant_by(name) {
            Some(own) => field.refuse(&format!("is not supported: {own} may be what is meant")),
            None => field.refuse("is not supported"),
        },
    }
}

/// Token ids, which are checked against the vocabulary later, and additions.
fn logit_bias(field: &JsonField) -> Result<Vec<(u32, f32)>, ApiError> {
    let bias =
        |(name, it): (&str, JsonField)| Some((name.parse().ok()?, it.value.number::<f64>() as f32));
    Ok(field.members()?.into_iter().filter_map(bias).collect())
}

/// Variables for the model's template, as vLLM's clients send them.
fn template_variables(field: &JsonField) -> Result<Map<String, Value>, ApiError> {
    let variable = |(name, it): (&str, JsonField)| {
        let value = match it.value {
            JsonTree::Bool(flag) => Value::Bool(*flag),
            JsonTree::String(text) => text.as_str().into(),
            number => number.number::<i64>().into(),
        };
        (name.to_owned(), value)
    };
    Ok(field.members()?.into_iter().map(variable).collect())
}

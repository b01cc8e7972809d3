//! Reads the body of `POST /v1/chat/completions`: fields that have an effect, fields that are
//! accepted without one, and refusals of all others.

use super::answer_format;
use super::json::{JsonField, JsonTree, refuse_rest};
use super::messages;
use super::tools::{self, ToolFields};
use crate::error::ApiError;
use cresset_base::ids::ModelId;
use cresset_engine::{NumberField, SAMPLING_NUMBERS, SamplingNumber};
use cresset_request::GenerationInput;
use cresset_text::ThinkingEffort;
use serde_json::{Map, Value};

/// Largest count of tokens a body may name; the model's limits are far below.
pub(super) const MAX_COUNT: i64 = u32::MAX as i64;
pub(super) const MAX_STOPS: usize = 8;
pub(super) const MAX_STOP_CHARACTERS: usize = 256;
pub(super) const MAX_LOGIT_BIASES: usize = 1024;
pub(super) const MAX_LABEL: usize = 512;
pub(super) const MAX_METADATA: usize = 16;
pub(super) const MAX_METADATA_KEY: usize = 64;
/// Variables of a template, and characters of a name or a text among them.
pub(super) const MAX_VARIABLES: usize = 16;
pub(super) const MAX_VARIABLE: usize = 64;

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
}

impl ChatRequest {
    pub fn parse(tree: &JsonTree) -> Result<Self, ApiError> {
        let JsonTree::Object(_) = tree else {
            return Err(ApiError::malformed("The body must be a JSON object."));
        };
        let mut request = Self::default();
        let mut tools = ToolFields::default();
        for (name, field) in (JsonField { path: String::new(), value: tree }).members()? {
            let known = tools.take(name, &field) || request.honour(name, &field)?;
            if !known && !request.tolerate(name, &field)? {
                return Err(refusal(name, &field));
            }
        }
        request.input.tools = tools.read(&mut request.ignored)?;
        request.check()
    }

    /// Takes a field that has an effect; false when `name` is not one.
    fn honour(&mut self, name: &str, field: &JsonField) -> Result<bool, ApiError> {
        let input = &mut self.input;
        let sampling = &mut input.sampling;
        match name {
            "model" => input.model = Some(ModelId(field.uuid()?)),
            "messages" => input.messages = messages::parse(field, &mut self.ignored)?,
            "stream" => input.stream = field.bool()?,
            "n" => drop(field.integer(1..=1)?),
            "max_tokens" => input.max_tokens = Some(count(field, 1)?),
            "max_completion_tokens" => self.max_completion_tokens = Some(count(field, 1)?),
            "min_tokens" => input.min_tokens = count(field, 0)?,
            "ignore_eos" => input.ignore_eos = field.bool()?,
            "stop" => input.stop = stops(field)?,
            "stream_options" => self.stream_options(field)?,
            "logprobs" => self.logprobs = field.bool()?,
            "top_logprobs" => self.top_logprobs = Some(field.integer(0..=20)? as u8),
            name if answer_format::FIELDS.contains(&name) => self.format(name, field)?,
            "chat_template_kwargs" => input.template_variables = template_variables(field)?,
            "reasoning_effort" => input.effort = Some(effort(field)?),
            "seed" => sampling.seed = Some(field.integer(i64::MIN..=i64::MAX)? as u64),
            "logit_bias" => sampling.logit_bias = logit_bias(field)?,
            _ => {
                let Some(number) = SAMPLING_NUMBERS.iter().find(|number| number.name == name)
                else {
                    return Ok(false);
                };
                sampling.numbers.insert(number.name, sampling_number(number, field)?);
            }
        }
        Ok(true)
    }

    /// Takes a field that has no effect, if its value asks for none; false when `name` is not one.
    fn tolerate(&mut self, name: &str, field: &JsonField) -> Result<bool, ApiError> {
        match name {
            "user" | "safety_identifier" => drop(field.text(MAX_LABEL)?),
            "metadata" => metadata(field)?,
            "store" => only(field, !field.bool()?, "can only be false")?,
            "service_tier" => only(field, field.text(MAX_LABEL)? == "auto", "can only be auto")?,
            "functions" => functions(field)?,
            "modalities" => {
                let items = field.items(1)?;
                only(
                    field,
                    items.iter().all(|item| item.text(MAX_LABEL) == Ok("text")),
                    "can only be [\"text\"]",
                )?;
            }
            _ => return Ok(false),
        }
        self.ignored.push(name.to_owned());
        Ok(true)
    }

    fn format(&mut self, name: &str, field: &JsonField) -> Result<(), ApiError> {
        let Some(format) = answer_format::parse(name, field, &mut self.ignored)? else {
            self.ignored.push(name.to_owned());
            return Ok(());
        };
        only(field, self.input.format.is_none(), "is the second format of this request; send one")?;
        self.input.format = Some(format);
        Ok(())
    }

    fn stream_options(&mut self, field: &JsonField) -> Result<(), ApiError> {
        let mut members = field.members()?;
        if let Some(include) = members.remove("include_usage") {
            self.include_usage = include.bool()?;
        }
        for name in ["continuous_usage_stats", "include_obfuscation"] {
            if let Some(field) = members.remove(name) {
                field.bool()?;
                self.ignored.push(field.path);
            }
        }
        refuse_rest(&members)
    }

    /// Checks the rules between fields, once all are read.
    fn check(mut self) -> Result<Self, ApiError> {
        let missing = |name: &str| Err(ApiError::invalid(name, format!("{name} is required.")));
        let input = &mut self.input;
        if input.model.is_none() {
            return missing("model");
        }
        if input.messages.is_empty() {
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
        Ok(self)
    }
}

fn refusal(name: &str, field: &JsonField) -> ApiError {
    match name {
        "cache_salt" | "cache_namespace" | "prompt_cache_key" => {
            field.refuse("cannot be chosen by the caller")
        }
        _ => field.refuse("is not supported"),
    }
}

fn only(field: &JsonField, holds: bool, must: &str) -> Result<(), ApiError> {
    if holds { Ok(()) } else { Err(field.refuse(must)) }
}

fn count(field: &JsonField, least: i64) -> Result<u32, ApiError> {
    Ok(field.integer(least..=MAX_COUNT)? as u32)
}

fn sampling_number(number: &SamplingNumber, field: &JsonField) -> Result<f64, ApiError> {
    let SamplingNumber { least, most, .. } = *number;
    match number.field {
        NumberField::Count(_) => field.integer(least as i64..=most as i64).map(|n| n as f64),
        NumberField::Real(_) => field.number(least..=most),
        NumberField::RealAbove(_) => {
            let read = field.number(least..=most).ok().filter(|n| number.allows(*n));
            read.ok_or_else(|| field.refuse(&format!("must be above {least} and at most {most}")))
        }
    }
}

/// One string, or up to 8; none of them empty.
fn stops(field: &JsonField) -> Result<Vec<String>, ApiError> {
    let all = match field.value {
        JsonTree::String(_) => vec![field.clone()],
        _ => field.items(MAX_STOPS)?,
    };
    all.iter().map(stop).collect()
}

fn stop(field: &JsonField) -> Result<String, ApiError> {
    let text = field.text(MAX_STOP_CHARACTERS)?;
    only(field, !text.is_empty(), "must not be empty").map(|()| text.to_owned())
}

/// Reads token ids (checked against the vocabulary later) and additions between -100 and 100.
fn logit_bias(field: &JsonField) -> Result<Vec<(u32, f32)>, ApiError> {
    let members = field.members()?;
    only(
        field,
        members.len() <= MAX_LOGIT_BIASES,
        &format!("must have at most {MAX_LOGIT_BIASES} entries"),
    )?;
    let entry = |(name, value): (&str, JsonField)| {
        // An id has one spelling: `5`, `05` and `+5` would be one token with three biases.
        let id = name.parse().ok().filter(|id: &u32| id.to_string() == name);
        let id = id.ok_or_else(|| field.refuse("must have token ids as keys"))?;
        Ok((id, value.number(-100.0..=100.0)? as f32))
    };
    members.into_iter().map(entry).collect()
}

fn metadata(field: &JsonField) -> Result<(), ApiError> {
    let members = field.members()?;
    only(
        field,
        members.len() <= MAX_METADATA,
        &format!("must have at most {MAX_METADATA} entries"),
    )?;
    for (name, value) in members {
        only(
            field,
            name.chars().count() <= MAX_METADATA_KEY,
            "must have keys of at most 64 characters",
        )?;
        value.text(MAX_LABEL)?;
    }
    Ok(())
}

/// The tools of older clients are bounded before they are refused; only an empty list passes.
fn functions(field: &JsonField) -> Result<(), ApiError> {
    let items = field.items(tools::MAX_TOOLS)?;
    items.iter().try_for_each(tools::check_bounds)?;
    only(field, items.is_empty(), "is not supported: send tools to a model that has them")
}

/// Variables for the model's template, as vLLM's clients send them.
fn template_variables(field: &JsonField) -> Result<Map<String, Value>, ApiError> {
    let members = field.members()?;
    only(
        field,
        members.len() <= MAX_VARIABLES,
        &format!("must have at most {MAX_VARIABLES} members"),
    )?;
    let mut variables = Map::new();
    for (name, value) in members {
        let must = "must have names of letters, digits and _";
        let is_name = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        only(field, name.len() <= MAX_VARIABLE && is_name(name), must)?;
        let read = match value.value {
            JsonTree::Bool(flag) => Value::Bool(*flag),
            JsonTree::Number(_) => value.integer(0..=MAX_COUNT)?.into(),
            JsonTree::String(_) => value.text(MAX_VARIABLE)?.into(),
            _ => return Err(value.refuse("must be true, false, a whole number or a short text")),
        };
        variables.insert(name.to_owned(), read);
    }
    Ok(variables)
}

fn effort(field: &JsonField) -> Result<ThinkingEffort, ApiError> {
    let word = field.text(MAX_VARIABLE).ok().and_then(ThinkingEffort::of);
    word.ok_or_else(|| {
        field.refuse(&format!("must be one of {}", ThinkingEffort::WORDS.join(", ")))
    })
}

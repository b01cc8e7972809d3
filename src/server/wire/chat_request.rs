//! Reads the body of `POST /v1/chat/completions`: fields that have an effect, fields that are
//! accepted without one, and refusals of all others.

use super::answer_format;
use super::fields::{JsonField, refuse_rest};
use super::json::JsonTree;
use super::messages;
use crate::engine::{NumberField, SAMPLING_NUMBERS, SamplingNumber};
use crate::ids::ModelId;
use crate::request::GenerationInput;
use crate::server::error::ApiError;

/// Largest count of tokens a body may name; the model's limits are far below.
pub(super) const MAX_COUNT: i64 = u32::MAX as i64;
pub(super) const MAX_STOPS: usize = 8;
pub(super) const MAX_STOP_CHARACTERS: usize = 256;
pub(super) const MAX_LOGIT_BIASES: usize = 1024;
pub(super) const MAX_LABEL: usize = 512;
pub(super) const MAX_METADATA: usize = 16;
pub(super) const MAX_METADATA_KEY: usize = 64;
const MAX_TOOLS: usize = 64;
const MAX_TOOL_NAME: usize = 64;
const MAX_TOOL_DESCRIPTION: usize = 4 * 1024;
const MAX_TOOL_SCHEMA: usize = 16 * 1024;

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
        for (name, field) in (JsonField { path: String::new(), value: tree }).members()? {
            if !request.honour(name, &field)? && !request.tolerate(name, &field)? {
                return Err(refusal(name, &field));
            }
        }
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
            "parallel_tool_calls" => drop(field.bool()?),
            "store" => only(field, !field.bool()?, "can only be false")?,
            "service_tier" => only(field, field.text(MAX_LABEL)? == "auto", "can only be auto")?,
            "tool_choice" => {
                let choice = field.text(MAX_LABEL).unwrap_or_default();
                only(field, ["none", "auto"].contains(&choice), "can only be none or auto")?;
            }
            "tools" | "functions" => tools(field)?,
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
        let (format, endless) = (&input.format, input.ignore_eos || input.min_tokens > 0);
        if let Some(asked) = format.as_ref().filter(|_| endless) {
            let why = format!(
                "{} decides where the answer ends: leave out ignore_eos and min_tokens.",
                asked.field
            );
            return Err(ApiError::invalid(asked.field, why));
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

/// Tools are bounded before they are refused; only an empty list passes.
fn tools(field: &JsonField) -> Result<(), ApiError> {
    let items = field.items(MAX_TOOLS)?;
    for item in &items {
        tool(item)?;
    }
    only(field, items.is_empty(), "is not supported: this service generates text only")
}

/// Reads either form: `{"type":"function","function":{…}}`, or the bare function of older clients.
fn tool(field: &JsonField) -> Result<(), ApiError> {
    let mut members = field.members()?;
    let function = members.remove("function").unwrap_or_else(|| field.clone());
    let mut members = function.members()?;
    if let Some(name) = members.remove("name") {
        name.text(MAX_TOOL_NAME)?;
    }
    if let Some(description) = members.remove("description") {
        description.text(MAX_TOOL_DESCRIPTION)?;
    }
    match members.remove("parameters") {
        Some(schema) => {
            only(&schema, schema_size(schema.value) <= MAX_TOOL_SCHEMA, "must have at most 16 KiB")
        }
        None => Ok(()),
    }
}

/// Bytes of names and values, close enough to the size of the schema's text to bound it.
fn schema_size(value: &JsonTree) -> usize {
    match value {
        JsonTree::Null | JsonTree::Bool(_) => 4,
        JsonTree::Number(literal) => literal.len(),
        JsonTree::String(text) => text.len() + 2,
        JsonTree::Array(items) => 2 + items.iter().map(|item| schema_size(item) + 1).sum::<usize>(),
        JsonTree::Object(members) => {
            2 + members.iter().map(|(name, item)| name.len() + 4 + schema_size(item)).sum::<usize>()
        }
    }
}

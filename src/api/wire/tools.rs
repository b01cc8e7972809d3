//! Reads `tools`, `tool_choice` and `parallel_tool_calls`.
//!
//! Bounds are checked at once. What else is wrong with a definition is told only of a model that
//! has tools: every other one refuses them all.

use super::json::{JsonField, JsonTree, refuse_rest, required};
use super::json_schema;
use crate::error::ApiError;
use cresset_request::{AskedTools, RequestError, ToolChoice};
use cresset_text::{ToolDefinition, is_of_name};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

pub(super) const MAX_TOOLS: usize = 64;
pub(super) const MAX_TOOL_NAME: usize = 64;
pub(super) const MAX_TOOL_DESCRIPTION: usize = 4 * 1024;
/// Bytes of one tool's schema, and of all together.
const MAX_TOOL_SCHEMA: usize = 16 * 1024;
const MAX_SCHEMAS: usize = 64 * 1024;
/// A function without parameters.
const NO_PARAMETERS: &str = r#"{"type":"object","properties":{},"additionalProperties":false}"#;

/// The members of a request that are about tools.
#[derive(Default)]
pub(super) struct ToolFields<'a> {
    tools: Option<JsonField<'a>>,
    choice: Option<JsonField<'a>>,
    parallel: Option<JsonField<'a>>,
}

/// A choice, before the definitions that it may name were read.
enum AskedChoice {
    Auto,
    None,
    Required,
    Named(String),
}

impl<'a> ToolFields<'a> {
    /// Takes a member; false when it is none of these.
    pub(super) fn take(&mut self, name: &str, field: &JsonField<'a>) -> bool {
        let place = match name {
            "tools" => &mut self.tools,
            "tool_choice" => &mut self.choice,
            "parallel_tool_calls" => &mut self.parallel,
            _ => return false,
        };
        *place = Some(field.clone());
        true
    }

    /// The tools that are asked for. Without any, the other members have no effect and go to
    /// `ignored`.
    pub(super) fn read(
        self,
        ignored: &mut Vec<String>,
    ) -> Result<Option<Result<AskedTools, RequestError>>, ApiError> {
        let items = self.tools.as_ref().map(|tools| tools.items(MAX_TOOLS)).transpose()?;
        let items = items.unwrap_or_default();
        items.iter().try_for_each(check_bounds)?;
        let parallel = self.parallel.as_ref().map(JsonField::bool).transpose()?.unwrap_or(true);
        let choice = self.choice.as_ref().map(|choice| choice_of(choice, !items.is_empty()));
        let choice = choice.transpose()?.unwrap_or(AskedChoice::Auto);
        if items.is_empty() {
            let fields = [self.parallel, self.choice, self.tools];
            ignored.extend(fields.into_iter().flatten().map(|field| field.path));
            return Ok(None);
        }
        let mut without_effect = Vec::new();
        let read = definitions(&items, choice, parallel, &mut without_effect);
        Ok(Some(match read {
            Ok(asked) => {
                ignored.extend(without_effect);
                Ok(asked)
            }
            Err(error) => Err(told_later(error)),
        }))
    }
}

/// An error of a definition, for the model to tell if it has tools.
fn told_later(error: ApiError) -> RequestError {
    let ApiError::InvalidRequest { message, param } = error else {
        return RequestError::refused("tools", "are not definitions of functions");
    };
    let field = param.unwrap_or_else(|| "tools".into());
    let why = message.strip_prefix(&field).unwrap_or(&message).trim().trim_end_matches('.');
    RequestError::refused(&field, why)
}

fn choice_of(field: &JsonField, has_tools: bool) -> Result<AskedChoice, ApiError> {
    let word = match field.value {
        JsonTree::String(word) => word.as_str(),
        _ => "",
    };
    match (word, field.value) {
        ("auto", _) => Ok(AskedChoice::Auto),
        ("none", _) => Ok(AskedChoice::None),
        _ if !has_tools => Err(field.refuse("can only be none or auto without tools")),
        ("required", _) => Ok(AskedChoice::Required),
        (_, JsonTree::Object(_)) => {
            let mut members = field.members()?;
            is_function(&mut members)?;
            let function = required(field, &mut members, "function")?;
            refuse_rest(&members)?;
            let mut members = function.members()?;
            let name = required(&function, &mut members, "name")?.text(MAX_TOOL_NAME)?;
            refuse_rest(&members)?;
            Ok(AskedChoice::Named(name.to_owned()))
        }
        _ => Err(field.refuse("must be none, auto, required or a function of tools")),
    }
}

fn is_function(members: &mut BTreeMap<&str, JsonField>) -> Result<(), ApiError> {
    match members.remove("type") {
        Some(kind) if kind.text(MAX_TOOL_NAME) != Ok("function") => {
            Err(kind.refuse("must be function"))
        }
        _ => Ok(()),
    }
}

/// Reads either form: `{"type":"function","function":{…}}`, or the bare function of older clients.
pub(super) fn check_bounds(field: &JsonField) -> Result<(), ApiError> {
    let mut members = function_of(field)?.members()?;
    if let Some(name) = members.remove("name") {
        name.text(MAX_TOOL_NAME)?;
    }
    if let Some(description) = members.remove("description") {
        description.text(MAX_TOOL_DESCRIPTION)?;
    }
    match members.remove("parameters") {
        Some(schema) if schema_size(schema.value) > MAX_TOOL_SCHEMA => {
            Err(schema.refuse("must have at most 16 KiB"))
        }
        _ => Ok(()),
    }
}

fn function_of<'a>(field: &JsonField<'a>) -> Result<JsonField<'a>, ApiError> {
    Ok(field.members()?.remove("function").unwrap_or_else(|| field.clone()))
}

fn definitions(
    items: &[JsonField],
    choice: AskedChoice,
    parallel: bool,
    ignored: &mut Vec<String>,
) -> Result<AskedTools, ApiError> {
    let mut definitions: Vec<ToolDefinition> = Vec::new();
    let mut shown = Vec::new();
    for item in items {
        let (definition, function) = definition(item, ignored)?;
        if definitions.iter().any(|known| known.name == definition.name) {
            return Err(item.refuse("has the name of another tool"));
        }
        definitions.push(definition);
        shown.push(json!({ "type": "function", "function": function }));
    }
    if definitions.iter().map(|tool| tool.parameters.len()).sum::<usize>() > MAX_SCHEMAS {
        let why = format!("tools must have at most {} KiB of schemas together.", MAX_SCHEMAS >> 10);
        return Err(ApiError::invalid("tools", why));
    }
    let place = |name: &String| definitions.iter().position(|tool| tool.name == *name);
    let choice = match choice {
        AskedChoice::Auto => ToolChoice::Auto,
        AskedChoice::None => ToolChoice::None,
        AskedChoice::Required => ToolChoice::Required,
        AskedChoice::Named(name) => ToolChoice::Named(place(&name).ok_or_else(|| {
            let why = "tool_choice names a function that is not among the tools.";
            ApiError::invalid("tool_choice", why)
        })?),
    };
    Ok(AskedTools { definitions, shown: Value::Array(shown), choice, parallel })
}

/// A definition, and its function as templates read it.
fn definition(
    item: &JsonField,
    ignored: &mut Vec<String>,
) -> Result<(ToolDefinition, Value), ApiError> {
    let function = function_of(item)?;
    if function.path != item.path {
        let mut outer = item.members()?;
        is_function(&mut outer)?;
        outer.remove("function");
        refuse_rest(&outer)?;
    }
    let mut members = function.members()?;
    if function.path == item.path {
        is_function(&mut members)?;
    }
    let name = required(&function, &mut members, "name")?;
    let text = name.text(MAX_TOOL_NAME)?;
    if text.is_empty() || !text.chars().all(is_of_name) {
        return Err(name.refuse("must have letters, digits, _, - and . alone"));
    }
    members.remove("description");
    let strict = members.remove("strict").map(|strict| strict.bool()).transpose()?;
    let parameters = members.remove("parameters");
    refuse_rest(&members)?;
    let parameters = match &parameters {
        Some(schema) => parameters_of(schema, strict.unwrap_or_default(), ignored)?,
        None => NO_PARAMETERS.to_owned(),
    };
    Ok((ToolDefinition { name: text.to_owned(), parameters }, shown(&function)))
}

fn parameters_of(
    schema: &JsonField,
    strict: bool,
    ignored: &mut Vec<String>,
) -> Result<String, ApiError> {
    json_schema::check(schema, strict, ignored)?;
    let is_object = schema.all_members().is_ok_and(|members| {
        members.get("type").is_some_and(|kind| kind.text(MAX_TOOL_NAME) == Ok("object"))
    });
    if is_object {
        Ok(schema.value.in_order())
    } else {
        Err(schema.refuse("must be of type object"))
    }
}

/// The function as the client wrote it, without members that are null.
fn shown(function: &JsonField) -> Value {
    let text = function.value.in_order();
    let mut members: Map<String, Value> = serde_json::from_str(&text).unwrap_or_default();
    members.retain(|name, value| !value.is_null() && name != "type");
    Value::Object(members)
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

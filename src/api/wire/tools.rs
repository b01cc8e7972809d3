//! Reads `tools`, `tool_choice` and `parallel_tool_calls`.
//!
//! Bounds are checked at once. What else is wrong with a definition is told only of a model that
//! has tools: every other one refuses them all.

use super::chat_schema::{body_members, check, check_members, most, only, schema};
use super::json::{JsonField, JsonTree, refuse_rest};
use super::json_schema::{self, Keeping};
use crate::error::ApiError;
use cresset_request::{AskedTools, RequestError, ToolChoice};
use cresset_text::ToolDefinition;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Bytes of one tool's schema, and of all together for each tool that there may be.
const MAX_TOOL_SCHEMA: usize = 16 * 1024;
const SCHEMAS_OF_EACH: usize = 1024;
/// A function without parameters.
const NO_PARAMETERS: &str = r#"{"type":"object","properties":{},"additionalProperties":false}"#;

/// A choice, before the definitions that it may name were read.
#[derive(PartialEq)]
enum AskedChoice {
    Auto,
    None,
    Required,
    Named(String),
}

/// The tools that are asked for. Without any, the other members have no effect and go to `ignored`.
pub(super) fn read(
    members: &BTreeMap<&str, JsonField>,
    ignored: &mut Vec<String>,
) -> Result<Option<Result<AskedTools, RequestError>>, ApiError> {
    let fields = ["parallel_tool_calls", "tool_choice", "tools"].map(|name| members.get(name));
    let [parallel, choice, tools] = fields;
    let items = tools.map(items).transpose()?.unwrap_or_default();
    let parallel = parallel.map(JsonField::bool).transpose()?;
    let choice = choice.map(|choice| choice_of(choice, !items.is_empty())).transpose()?;
    if items.is_empty() {
        ignored.extend(fields.into_iter().flatten().map(|field| field.path.clone()));
        return Ok(None);
    }
    let mut without_effect = Vec::new();
    let choice = choice.unwrap_or(AskedChoice::Auto);
    // A small model that must call repeats its call for as long as it may.
    let parallel = parallel.unwrap_or(choice == AskedChoice::Auto);
    let read = definitions(&items, choice, parallel, &mut without_effect).map_err(told_later);
    if read.is_ok() {
        ignored.extend(without_effect);
    }
    Ok(Some(read))
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
    match (field.value.text(), field.value) {
        ("auto", _) => Ok(AskedChoice::Auto),
        ("none", _) => Ok(AskedChoice::None),
        _ if !has_tools => Err(field.refuse("can only be none or auto without tools")),
        ("required", _) => Ok(AskedChoice::Required),
        (_, JsonTree::Object(_)) => {
            check(&body_members()["tool_choice"]["anyOf"][1], field, &mut Vec::new())?;
            Ok(AskedChoice::Named(field.value.get("function").get("name").text().to_owned()))
        }
        _ => Err(field.refuse("must be none, auto, required or a function of tools")),
    }
}

/// The definitions of a list, within their bounds.
pub(super) fn items<'a>(field: &JsonField<'a>) -> Result<Vec<JsonField<'a>>, ApiError> {
    let items = field.items(most_tools(field))?;
    items.iter().try_for_each(check_bounds).map(|()| items)
}

fn most_tools(field: &JsonField) -> usize {
    most(&body_members()["tools"], "maxItems", field).unwrap_or_default()
}

/// Reads either form: `{"type":"function","function":{…}}`, or the bare function of older clients.
fn check_bounds(field: &JsonField) -> Result<(), ApiError> {
    let rows = &schema("ToolFunction")["properties"];
    let mut members = function_of(field)?.members()?;
    for name in ["name", "description"] {
        if let Some(text) = members.remove(name) {
            text.text(most(&rows[name], "maxLength", field).unwrap_or_default())?;
        }
    }
    let most = field.bounds.get("schema").copied().unwrap_or(MAX_TOOL_SCHEMA);
    match members.remove("parameters") {
        Some(schema) if schema_size(schema.value) > most => {
            Err(schema.refuse(&format!("must have at most {} KiB", most >> 10)))
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
    let most = items.first().map_or(0, most_tools).saturating_mul(SCHEMAS_OF_EACH);
    if definitions.iter().map(|tool| tool.parameters.len()).sum::<usize>() > most {
        let why = format!("tools must have at most {} KiB of schemas together.", most >> 10);
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
    let mut members = function.members()?;
    let mut outer = item.members()?;
    if outer.remove("function").is_none() {
        // The bare function has the members of both.
        outer.retain(|name, _| *name == "type");
        members.remove("type");
    }
    if let Some(kind) = outer.remove("type") {
        check(&schema("Tool")["properties"]["type"], &kind, ignored)?;
    }
    refuse_rest(&outer)?;
    let strict = function.value.get("strict").is_true();
    let parameters = members.get("parameters").cloned();
    check_members(schema("ToolFunction"), &function, members, ignored)?;
    let parameters = match &parameters {
        Some(schema) => parameters_of(schema, strict, ignored)?,
        None => NO_PARAMETERS.to_owned(),
    };
    let name = function.value.get("name").text().to_owned();
    Ok((ToolDefinition { name, parameters, strict }, shown(&function)))
}

fn parameters_of(
    schema: &JsonField,
    strict: bool,
    ignored: &mut Vec<String>,
) -> Result<String, ApiError> {
    only(schema, schema.value.get("type").text() == "object", "must be of type object")?;
    let keeping = if strict { Keeping::Strict } else { Keeping::Loosened };
    json_schema::read(schema, keeping, ignored).map(|checked| checked.text)
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

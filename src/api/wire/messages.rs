//! The `messages` of a completion request.

use super::json::{JsonField, JsonTree, missing, refuse_rest, required};
use crate::error::ApiError;
use cresset_text::ChatMessage;
use serde_json::{Value, json};
use std::collections::BTreeMap;

pub(super) const MAX_MESSAGES: usize = 64;
pub(super) const MAX_PARTS: usize = 64;
pub(super) const MAX_TOOL_CALLS: usize = 64;
/// Characters of a name, a tool call's id or a function's name.
pub(super) const MAX_NAME: usize = 64;
pub(super) const MAX_ARGUMENTS: usize = 16 * 1024;
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

type MessageFields<'a> = BTreeMap<&'a str, JsonField<'a>>;

/// Reads 1 to 64 messages. Null members are dropped and named in `ignored`: clients send replies
/// back as they received them.
pub fn parse(field: &JsonField, ignored: &mut Vec<String>) -> Result<Vec<ChatMessage>, ApiError> {
    let items = field.items(MAX_MESSAGES)?;
    if items.is_empty() {
        return Err(field.refuse("must have at least one message"));
    }
    items.iter().map(|item| message(item, ignored)).collect()
}

fn message(field: &JsonField, ignored: &mut Vec<String>) -> Result<ChatMessage, ApiError> {
    let mut members = field.all_members()?;
    drop_nulls(&mut members, ignored);
    let role = role(&required(field, &mut members, "role")?)?;
    let name = members.remove("name").map(|name| short(&name)).transpose()?;
    let tool_calls =
        members.remove("tool_calls").map(|calls| tool_calls(role, &calls)).transpose()?.flatten();
    let tool_call_id = tool_call_id(field, role, members.remove("tool_call_id"))?;
    let content = content(field, members.remove("content"), tool_calls.is_some())?;
    let reasoning_content = thought(role, &mut members)?;
    refuse_rest(&members)?;
    let role = role.to_owned();
    Ok(ChatMessage { role, content, name, tool_call_id, tool_calls, reasoning_content })
}

/// What the model thought before an earlier answer, by either of its names. The body's size bounds
/// it.
fn thought(role: &str, members: &mut MessageFields) -> Result<Option<String>, ApiError> {
    let mut found = None;
    for name in ["reasoning_content", "reasoning"] {
        let Some(field) = members.remove(name) else { continue };
        if role != "assistant" {
            return Err(field.refuse("belongs to assistant messages"));
        }
        let text = field.text(usize::MAX)?;
        if found.as_deref().is_some_and(|known| known != text) {
            return Err(field.refuse("differs from reasoning_content: send one of them"));
        }
        found = Some(text.to_owned());
    }
    Ok(found)
}

/// Only an assistant's tool calls can replace its text.
fn content(
    of: &JsonField,
    found: Option<JsonField>,
    has_calls: bool,
) -> Result<Option<String>, ApiError> {
    match found {
        Some(content) => text(&content).map(Some),
        None if has_calls => Ok(None),
        None => Err(missing(of, "content")),
    }
}

fn tool_call_id(
    of: &JsonField,
    role: &str,
    found: Option<JsonField>,
) -> Result<Option<String>, ApiError> {
    match found {
        Some(id) if role == "tool" => short(&id).map(Some),
        Some(id) => Err(id.refuse("belongs to tool messages")),
        None if role == "tool" => Err(missing(of, "tool_call_id")),
        None => Ok(None),
    }
}

fn drop_nulls(members: &mut MessageFields, ignored: &mut Vec<String>) {
    members.retain(|name, field| {
        if field.is_null() && *name != "content" {
            ignored.push(field.path.clone());
        }
        !field.is_null()
    });
}

fn role<'a>(field: &JsonField<'a>) -> Result<&'a str, ApiError> {
    let must = || field.refuse("must be system, user, assistant or tool");
    field.text(MAX_NAME).ok().filter(|role| ROLES.contains(role)).ok_or_else(must)
}

fn short(field: &JsonField) -> Result<String, ApiError> {
    field.text(MAX_NAME).map(str::to_owned)
}

/// A string, or text parts in a row. The body's size bounds the text.
fn text(field: &JsonField) -> Result<String, ApiError> {
    if let Ok(text) = field.text(usize::MAX) {
        return Ok(text.to_owned());
    }
    let parts = field.items(MAX_PARTS).map_err(|error| match field.value {
        JsonTree::Array(_) => error,
        _ => field.refuse("must be a string or an array of text parts"),
    })?;
    parts.iter().map(part).collect()
}

fn part<'a>(field: &JsonField<'a>) -> Result<&'a str, ApiError> {
    let mut members = field.members()?;
    let kind = required(field, &mut members, "type")?;
    if kind.text(MAX_NAME) != Ok("text") {
        return Err(kind.refuse("must be text; no other content is supported"));
    }
    let text = required(field, &mut members, "text")?.text(usize::MAX)?;
    refuse_rest(&members)?;
    Ok(text)
}

/// Calls of an earlier turn, in the form that templates take. An empty list counts as none.
fn tool_calls(role: &str, field: &JsonField) -> Result<Option<Value>, ApiError> {
    if role != "assistant" {
        return Err(field.refuse("belongs to assistant messages"));
    }
    let calls: Vec<Value> =
        field.items(MAX_TOOL_CALLS)?.iter().map(tool_call).collect::<Result<_, _>>()?;
    Ok((!calls.is_empty()).then_some(Value::Array(calls)))
}

fn tool_call(field: &JsonField) -> Result<Value, ApiError> {
    let mut members = field.members()?;
    let id = required(field, &mut members, "id")?.text(MAX_NAME)?;
    let kind = required(field, &mut members, "type")?;
    if kind.text(MAX_NAME) != Ok("function") {
        return Err(kind.refuse("must be function"));
    }
    let function = required(field, &mut members, "function")?;
    refuse_rest(&members)?;
    let mut members = function.members()?;
    let name = required(&function, &mut members, "name")?.text(MAX_NAME)?;
    let arguments = required(&function, &mut members, "arguments")?.text(MAX_ARGUMENTS)?;
    refuse_rest(&members)?;
    Ok(
        json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } }),
    )
}

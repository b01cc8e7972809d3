//! The `messages` of a completion request.

use super::chat_schema::{check, is_word, schema};
use super::json::{JsonField, JsonTree, missing, refuse_rest, required};
use crate::error::ApiError;
use cresset_text::ChatMessage;
use serde_json::{Value, json};

/// The members beside a role, in the order in which they are checked, and the role that alone may
/// have them.
const MEMBERS: [(&str, &str); 7] = [
    ("name", ""),
    ("tool_calls", "assistant"),
    ("tool_call_id", "tool"),
    ("content", ""),
    ("reasoning_content", "assistant"),
    ("reasoning", "assistant"),
    ("prefix", "assistant"),
];

/// Reads messages. Null members are dropped and named in `ignored`: clients send replies back as
/// they received them.
pub fn parse(field: &JsonField, ignored: &mut Vec<String>) -> Result<Vec<ChatMessage>, ApiError> {
    field.items(usize::MAX)?.iter().map(|item| message(item, ignored)).collect()
}

/// The path of the `prefix` by which the last message is to be continued.
pub fn prefix(field: &JsonField) -> Result<Option<String>, ApiError> {
    let items = field.items(usize::MAX)?;
    let Some(at) = items.iter().position(|item| item.value.get("prefix").is_true()) else {
        return Ok(None);
    };
    let path = items[at].path_of("prefix");
    if at + 1 == items.len() {
        return Ok(Some(path));
    }
    let why = format!("{path} can only be true in the last message.");
    Err(ApiError::invalid(path, why))
}

fn message(field: &JsonField, ignored: &mut Vec<String>) -> Result<ChatMessage, ApiError> {
    let mut members = field.all_members()?;
    members.retain(|name, member| {
        if member.is_null() && *name != "content" {
            ignored.push(member.path.clone());
        }
        !member.is_null()
    });
    let role = required(field, &mut members, "role")?;
    let mut shapes = schema("Message")["anyOf"].as_array().into_iter().flatten();
    let shape = shapes.find(|shape| is_word(&shape["properties"]["role"], role.value));
    let must = "must be system, user, assistant or tool";
    let shape = &shape.ok_or_else(|| role.refuse(must))?["properties"];
    let calls = field.value.get("tool_calls").items();
    let thought = field.value.get("reasoning_content");
    for (name, owner) in MEMBERS {
        // The second name of what a model thought is not for new clients.
        let schema = &shape[if name == "reasoning" { "reasoning_content" } else { name }];
        match members.remove(name) {
            Some(member) if schema.is_null() => {
                return Err(member.refuse(&format!("belongs to {owner} messages")));
            }
            Some(member) => {
                check(schema, &member, ignored)?;
                if name == "reasoning" && ![&JsonTree::Null, member.value].contains(&thought) {
                    return Err(member.refuse("differs from reasoning_content: send one of them"));
                }
            }
            // Only an assistant's calls can replace its text.
            None if name == "content" && calls.is_empty() => return Err(missing(field, name)),
            None if name == "tool_call_id" && !schema.is_null() => {
                return Err(missing(field, name));
            }
            None => {}
        }
    }
    refuse_rest(&members)?;
    let of = |name: &str| Some(field.value.get(name)).filter(|it| **it != JsonTree::Null);
    let text = |name: &str| of(name).map(|it| it.text().to_owned());
    Ok(ChatMessage {
        role: role.value.text().to_owned(),
        content: of("content").map(content),
        name: text("name"),
        tool_call_id: text("tool_call_id"),
        tool_calls: (!calls.is_empty()).then(|| calls.iter().map(tool_call).collect()),
        reasoning_content: text("reasoning_content").or_else(|| text("reasoning")),
    })
}

/// A text, whole or in parts.
fn content(it: &JsonTree) -> String {
    let part = |part: &JsonTree| [part.text(), part.get("text").text()].concat();
    it.items().iter().map(part).collect()
}

/// A call of an earlier turn, in the form that templates take.
fn tool_call(call: &JsonTree) -> Value {
    let (id, function) = (call.get("id").text(), call.get("function"));
    let (name, arguments) = (function.get("name").text(), function.get("arguments").text());
    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
}

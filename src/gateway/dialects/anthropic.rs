//! Anthropic's `POST /v1/messages`.

use super::{
    AnswerEnd, AnswerHead, AnswerWriter, JsonMembers, NO_TOOLS, Question, TEXT_ONLY, UpstreamError,
    event, message,
};
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

/// Anthropic's status for a service that has no room at the moment.
const OVERLOADED: u16 = 529;
/// Members without an effect on the text.
const HARMLESS: [&str; 5] =
    ["metadata", "service_tier", "betas", "context_management", "cache_control"];

#[derive(Deserialize)]
struct AnthropicTurn {
    role: String,
    content: AnthropicContent,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum AnthropicContent {
    Text(String),
    Blocks(Vec<Value>),
}

pub(super) fn read(mut asked: JsonMembers) -> Result<Question, String> {
    asked.leave_out(&HARMLESS);
    asked.take_empty("tools", NO_TOOLS)?;
    asked.leave_out(&["tool_choice"]);
    thinking(&mut asked)?;
    format(&mut asked)?;
    let is_streamed = asked.take("stream", "true or false")?.unwrap_or(false);
    asked.rename("stop_sequences", "stop");
    let mut messages = Vec::new();
    if let Some(system) = asked.take("system", "a text or a list of text blocks")? {
        messages.push(message("system", content(system)?));
    }
    let must = "a list of messages with role and content";
    let turns: Option<Vec<AnthropicTurn>> = asked.take("messages", must)?;
    for turn in turns.ok_or_else(|| "messages is required.".to_owned())? {
        messages.push(message(&turn.role, content(turn.content)?));
    }
    asked.add("messages", &messages);
    Ok(Question { chat: asked, writer: Box::new(AnthropicWriter), is_streamed })
}

/// Extended thinking can be off; `adaptive` leaves it to the model, which here never thinks apart.
fn thinking(asked: &mut JsonMembers) -> Result<(), String> {
    let thinking: Value = asked.take("thinking", "an object")?.unwrap_or_default();
    match thinking["type"].as_str() {
        None | Some("disabled" | "adaptive") => Ok(()),
        Some(_) => {
            Err("thinking is not supported: turn extended thinking off in the client.".into())
        }
    }
}

/// An answer's format goes to the node; how much effort it takes cannot be chosen.
fn format(asked: &mut JsonMembers) -> Result<(), String> {
    let config: Option<JsonMembers> = asked.take("output_config", "an object")?;
    let Some(mut config) = config else { return Ok(()) };
    config.take_empty("effort", "is not supported: leave output_config.effort out")?;
    let format: Value = config.take("format", "an object")?.unwrap_or_default();
    if !format.is_null() {
        asked.add("structured_outputs", &json!({ "json": format["schema"] }));
    }
    match config.0.first() {
        Some((name, _)) => Err(format!("output_config.{name} is not supported.")),
        None => Ok(()),
    }
}

/// Text stays, an earlier answer's thoughts are left out, and anything else is refused.
fn content(content: AnthropicContent) -> Result<Value, String> {
    let blocks = match content {
        AnthropicContent::Text(text) => return Ok(text.into()),
        AnthropicContent::Blocks(blocks) => blocks,
    };
    let mut parts = Vec::with_capacity(blocks.len());
    for block in blocks {
        match block["type"].as_str() {
            Some("text") => parts.push(json!({ "type": "text", "text": block["text"] })),
            Some("thinking" | "redacted_thinking") => {}
            Some("tool_use" | "tool_result") => {
                return Err(format!("Blocks of tools {NO_TOOLS}."));
            }
            _ => return Err(TEXT_ONLY.into()),
        }
    }
    Ok(parts.into())
}

pub(super) fn refusal(status: StatusCode, error: &UpstreamError) -> (StatusCode, Value) {
    let overloaded = StatusCode::from_u16(OVERLOADED).unwrap_or(status);
    let status = if status == StatusCode::SERVICE_UNAVAILABLE { overloaded } else { status };
    (status, error_object(kind(status), error))
}

fn kind(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        504 => "timeout_error",
        OVERLOADED => "overloaded_error",
        _ if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}

fn error_object(kind: &str, error: &UpstreamError) -> Value {
    let about = json!({ "type": kind, "message": error.message, "code": error.code });
    json!({ "type": "error", "error": about, "request_id": error.request_id })
}

#[derive(Debug)]
struct AnthropicWriter;

/// An event whose name is its type.
fn typed(out: &mut String, data: &Value) {
    event(out, data["type"].as_str(), data);
}

fn stop_reason(end: &AnswerEnd) -> &'static str {
    // Which of the texts in `stop` ended an answer is not told, nor whether one did.
    if end.is_cut_off() { "max_tokens" } else { "end_turn" }
}

/// Tokens read from the cache are not counted as input in this dialect.
fn usage(end: &AnswerEnd) -> Value {
    json!({
        "input_tokens": end.prompt_tokens - end.cached_tokens.min(end.prompt_tokens),
        "cache_read_input_tokens": end.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": end.completion_tokens,
    })
}

impl AnswerWriter for AnthropicWriter {
    fn begin(&mut self, head: &AnswerHead, out: &mut String) {
        // The prompt's tokens are known at the end; clients need the members all the same.
        let none = json!({
            "input_tokens": 0, "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0, "output_tokens": 0,
        });
        let begun = answer(head, &json!([]), None, &none);
        typed(out, &json!({ "type": "message_start", "message": begun }));
        let block = json!({ "type": "text", "text": "" });
        let start = json!({ "type": "content_block_start", "index": 0, "content_block": block });
        typed(out, &start);
    }

    fn text(&mut self, _: &AnswerHead, text: &str, out: &mut String) {
        let delta = json!({ "type": "text_delta", "text": text });
        typed(out, &json!({ "type": "content_block_delta", "index": 0, "delta": delta }));
    }

    fn end(&mut self, _: &AnswerHead, end: &AnswerEnd, out: &mut String) {
        typed(out, &json!({ "type": "content_block_stop", "index": 0 }));
        let delta = json!({ "stop_reason": stop_reason(end), "stop_sequence": null });
        let last = json!({
            "type": "message_delta", "delta": delta, "usage": usage(end), "credits": end.credits,
        });
        typed(out, &last);
        typed(out, &json!({ "type": "message_stop" }));
    }

    fn fail(&mut self, _: &AnswerHead, error: &UpstreamError, out: &mut String) {
        typed(out, &error_object("api_error", error));
    }

    fn keep_alive(&mut self, out: &mut String) {
        typed(out, &json!({ "type": "ping" }));
    }

    fn whole(&mut self, head: &AnswerHead, text: &str, end: &AnswerEnd) -> Value {
        let block = json!([{ "type": "text", "text": text }]);
        let mut answer = answer(head, &block, Some(stop_reason(end)), &usage(end));
        answer["credits"] = end.credits.clone();
        answer
    }
}

fn answer(head: &AnswerHead, content: &Value, stop_reason: Option<&str>, usage: &Value) -> Value {
    json!({
        "id": head.id, "type": "message", "role": "assistant", "model": head.model,
        "content": content, "stop_reason": stop_reason, "stop_sequence": null, "usage": usage,
    })
}

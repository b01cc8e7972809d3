//! Anthropic's `POST /v1/messages`.

use super::node_events::NodeCall;
use super::{
    AnswerContent, AnswerEnd, AnswerHead, AnswerWriter, EFFORT, JsonMembers, LeftOut, NodePart,
    Question, TEXT_ONLY, TURNS, UnservedTools, UpstreamError, called, calling, continue_last,
    event, message, only_function, result,
};
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

/// Anthropic's status for a service that has no room at the moment.
const OVERLOADED: u16 = 529;
/// Members without an effect on the text.
const HARMLESS: [&str; 7] = [
    "metadata",
    "service_tier",
    "betas",
    "context_management",
    "cache_control",
    "inference_geo",
    "speed",
];
/// Members of blocks and tools that are read.
const OF_TEXT: [&str; 2] = ["type", "text"];
const OF_TOOL: [&str; 5] = ["type", "name", "description", "input_schema", "strict"];

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
    let mut left_out = LeftOut::default();
    asked.leave_out(&HARMLESS, &mut left_out);
    asked.take_empty(&[
        ("container", "is not supported: no code is run here"),
        ("mcp_servers", "is not supported: give the servers' tools as tools of your own"),
    ])?;
    tools(&mut asked, &mut left_out)?;
    let effort = format(&mut asked)?;
    let shows_thoughts = thinking(&mut asked, effort.as_ref(), &mut left_out)?;
    let is_streamed = asked.take("stream", "true or false")?.unwrap_or(false);
    asked.rename("stop_sequences", "stop");
    let mut messages = Vec::new();
    if let Some(system) = asked.take("system", "a text or a list of text blocks")? {
        messages.extend(turn("system", system, &mut left_out)?);
    }
    let turns: Option<Vec<AnthropicTurn>> = asked.take("messages", TURNS)?;
    for turn in turns.ok_or_else(|| "messages is required.".to_owned())? {
        messages.extend(self::turn(&turn.role, turn.content, &mut left_out)?);
    }
    continue_last(&mut asked, &mut messages);
    asked.add("messages", &messages);
    let writer = Box::new(AnthropicWriter { shows_thoughts, ..AnthropicWriter::default() });
    Ok(Question { chat: asked, writer, is_streamed, left_out, effort: "thinking" })
}

/// Definitions of tools, and which of them may be called.
fn tools(asked: &mut JsonMembers, left_out: &mut LeftOut) -> Result<(), String> {
    let mut tools: Vec<Value> = asked.take("tools", "a list of tools")?.unwrap_or_default();
    let choice: Value = asked.take("tool_choice", "an object")?.unwrap_or_default();
    let mut unserved = UnservedTools::default();
    tools.retain(|tool| match tool["type"].as_str() {
        None | Some("custom") => true,
        Some(kind) => {
            unserved.add(kind, tool["name"].as_str().unwrap_or_default(), left_out);
            false
        }
    });
    let must = (choice["type"] == "any").then_some(tools.len());
    unserved.refuse_choice(choice["name"].as_str().unwrap_or_default(), must)?;
    if tools.is_empty() {
        return Ok(());
    }
    let tools: Vec<Value> = tools.iter().map(|tool| self::tool(tool, left_out)).collect();
    asked.add("tools", &tools);
    self::choice(asked, &choice)
}

/// Which of the tools may be called, and how many at a time.
fn choice(asked: &mut JsonMembers, choice: &Value) -> Result<(), String> {
    if choice["disable_parallel_tool_use"] == true {
        asked.add("parallel_tool_calls", &false);
    }
    match choice["type"].as_str() {
        None | Some("auto") => {}
        Some("none") => asked.add("tool_choice", &"none"),
        Some("any") => asked.add("tool_choice", &"required"),
        Some("tool") => asked.add("tool_choice", &only_function(&choice["name"])),
        Some(_) => return Err("tool_choice.type must be auto, any, tool or none.".into()),
    }
    Ok(())
}

fn tool(tool: &Value, left_out: &mut LeftOut) -> Value {
    note_others("tools[]", tool, &OF_TOOL, left_out);
    let [name, description] = ["name", "description"].map(|member| &tool[member]);
    let mut function =
        json!({ "name": name, "description": description, "parameters": tool["input_schema"] });
    if tool["strict"] == true {
        function["strict"] = true.into();
    }
    json!({ "type": "function", "function": function })
}

/// Notes members that say something and are not read.
fn note_others(place: &str, object: &Value, read: &[&str], left_out: &mut LeftOut) {
    let all = object.as_object().into_iter().flatten();
    let others = all.filter(|(name, value)| !read.contains(&name.as_str()) && !value.is_null());
    others.for_each(|(name, _)| left_out.add_member(place, name));
}

/// Extended thinking is on or off; `adaptive` leaves it to the model, in the degree of `effort`.
/// Whether thoughts are shown.
fn thinking(
    asked: &mut JsonMembers,
    effort: Option<&Value>,
    left_out: &mut LeftOut,
) -> Result<bool, String> {
    let thinking: Value = asked.take("thinking", "an object")?.unwrap_or_default();
    if !thinking["budget_tokens"].is_null() {
        left_out.add("thinking.budget_tokens");
    }
    let kind = thinking["type"].as_str();
    let [none, high] = ["none", "high"].map(Value::from);
    let degree = match kind {
        None => None,
        Some("adaptive") => effort,
        Some("disabled") => Some(&none),
        Some("enabled") => effort.or(Some(&high)),
        Some(_) => return Err("thinking.type must be enabled, adaptive or disabled.".into()),
    };
    // How much of an answer is written beside thoughts cannot be chosen.
    if effort.is_some() && effort != degree {
        left_out.add("output_config.effort");
    }
    if let Some(degree) = degree {
        asked.add(EFFORT, degree);
    }
    Ok(matches!(kind, Some("enabled" | "adaptive")))
}

/// An answer's format goes to the node. Returns how much effort it may take.
fn format(asked: &mut JsonMembers) -> Result<Option<Value>, String> {
    let config: Option<JsonMembers> = asked.take("output_config", "an object")?;
    let Some(mut config) = config else { return Ok(None) };
    let effort: Option<Value> = config.take("effort", "a text")?;
    let format: Value = config.take("format", "an object")?.unwrap_or_default();
    if !format.is_null() {
        asked.add("structured_outputs", &json!({ "json": format["schema"] }));
    }
    match config.0.first() {
        Some((name, _)) => Err(format!("output_config.{name} is not supported.")),
        None => Ok(effort.filter(|effort| !effort.is_null())),
    }
}

/// The messages that a turn is: results of tools are messages of their own. An earlier answer's
/// thoughts are left out, and so is what tools of another service did. Files are refused.
fn turn(
    role: &str,
    content: AnthropicContent,
    left_out: &mut LeftOut,
) -> Result<Vec<Value>, String> {
    let blocks = match content {
        AnthropicContent::Text(text) => return Ok(vec![message(role, text)]),
        AnthropicContent::Blocks(blocks) => blocks,
    };
    let (mut parts, mut calls, mut messages) = (Vec::new(), Vec::new(), Vec::new());
    for block in blocks {
        let text = |member: &str| block[member].as_str().unwrap_or_default();
        match text("type") {
            "text" => {
                note_others("messages[].content[]", &block, &OF_TEXT, left_out);
                parts.push(json!({ "type": "text", "text": block["text"] }));
            }
            "thinking" | "redacted_thinking" => {}
            "tool_use" => calls.push(called(text("id"), text("name"), block["input"].to_string())),
            "tool_result" => messages.push(tool_result(&block)?),
            kind if kind == "server_tool_use" || kind.ends_with("_tool_result") => {
                left_out.add_member("messages[].content[]", kind);
            }
            _ => return Err(TEXT_ONLY.into()),
        }
    }
    if !calls.is_empty() {
        let content = if parts.is_empty() { Value::Null } else { parts.into() };
        messages.push(calling(content, &calls));
    } else if !parts.is_empty() || messages.is_empty() {
        messages.push(message(role, parts));
    }
    Ok(messages)
}

/// Reads a tool's result, which is a text or blocks of text.
fn tool_result(block: &Value) -> Result<Value, String> {
    let id = block["tool_use_id"].as_str().unwrap_or_default();
    let Value::Array(blocks) = &block["content"] else {
        return Ok(result(id, block["content"].as_str().unwrap_or_default()));
    };
    let texts = blocks.iter().map(|block| block["text"].as_str().ok_or(TEXT_ONLY));
    Ok(result(id, texts.collect::<Result<Vec<_>, _>>()?.concat()))
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

#[derive(Debug, Default)]
struct AnthropicWriter {
    shows_thoughts: bool,
    /// Blocks that were begun.
    begun: u64,
    /// The type of the block that has not ended.
    open: Option<&'static str>,
}

impl AnthropicWriter {
    /// Begins a block of this type, which is the same until another one begins.
    fn begin_block(&mut self, kind: &'static str, block: &Value, out: &mut String) {
        self.end_block(out);
        self.open = Some(kind);
        let start =
            json!({ "type": "content_block_start", "index": self.begun, "content_block": block });
        typed(out, &start);
        self.begun += 1;
    }

    fn end_block(&mut self, out: &mut String) {
        if self.open.take().is_some() {
            typed(out, &json!({ "type": "content_block_stop", "index": self.begun - 1 }));
        }
    }

    fn delta(&self, delta: &Value, out: &mut String) {
        let index = self.begun.saturating_sub(1);
        typed(out, &json!({ "type": "content_block_delta", "index": index, "delta": delta }));
    }
}

fn thinking_block(text: &str) -> Value {
    json!({ "type": "thinking", "thinking": text, "signature": "" })
}

fn tool_block(id: &str, name: &str, input: &Value) -> Value {
    json!({ "type": "tool_use", "id": id, "name": name, "input": input })
}

/// An event whose name is its type.
fn typed(out: &mut String, data: &Value) {
    event(out, data["type"].as_str(), data);
}

fn stop_reason(end: &AnswerEnd) -> &'static str {
    // Which of the texts in `stop` ended an answer is not told, nor whether one did.
    match end.finish_reason.as_str() {
        "length" => "max_tokens",
        "tool_calls" => "tool_use",
        _ => "end_turn",
    }
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
        // How many of them were cached is known at the end; clients need the members all the same.
        let so_far = json!({
            "input_tokens": head.prompt_tokens, "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0, "output_tokens": 0,
        });
        let begun = answer(head, &json!([]), None, &so_far);
        typed(out, &json!({ "type": "message_start", "message": begun }));
    }

    fn part(&mut self, _: &AnswerHead, part: &NodePart, out: &mut String) {
        match part {
            NodePart::Text(text) => {
                if self.open != Some("text") {
                    self.begin_block("text", &json!({ "type": "text", "text": "" }), out);
                }
                self.delta(&json!({ "type": "text_delta", "text": text }), out);
            }
            NodePart::Thought(text) if self.shows_thoughts => {
                if self.open != Some("thinking") {
                    self.begin_block("thinking", &thinking_block(""), out);
                }
                self.delta(&json!({ "type": "thinking_delta", "thinking": text }), out);
            }
            NodePart::Thought(_) | NodePart::Scores(_) => {}
            NodePart::Call { id, name } => {
                self.begin_block("tool_use", &tool_block(id, name, &json!({})), out);
            }
            NodePart::Arguments(more) => {
                self.delta(&json!({ "type": "input_json_delta", "partial_json": more }), out);
            }
        }
    }

    fn end(&mut self, _: &AnswerHead, end: &AnswerEnd, out: &mut String) {
        self.end_block(out);
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

    fn whole(&mut self, head: &AnswerHead, content: &AnswerContent, end: &AnswerEnd) -> Value {
        let AnswerContent { thought, text, calls, .. } = content;
        let mut blocks = Vec::new();
        if self.shows_thoughts && !thought.is_empty() {
            blocks.push(thinking_block(thought));
        }
        if !text.is_empty() || calls.is_empty() {
            blocks.push(json!({ "type": "text", "text": text }));
        }
        for NodeCall { id, name, arguments } in calls {
            // The arguments of a call that was cut off are no JSON.
            let input = serde_json::from_str(arguments).unwrap_or_else(|_| json!({}));
            blocks.push(tool_block(id, name, &input));
        }
        let mut answer = answer(head, &json!(blocks), Some(stop_reason(end)), &usage(end));
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

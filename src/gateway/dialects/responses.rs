//! OpenAI's `POST /v1/responses`. Nothing is kept between requests: a client sends the whole
//! conversation each time.

use super::{
    AnswerEnd, AnswerHead, AnswerWriter, JsonMembers, NO_TOOLS, Question, TEXT_ONLY, UpstreamError,
    event, message,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Members without an effect on the text.
const HARMLESS: [&str; 5] =
    ["include", "prompt_cache_key", "prompt_cache_retention", "client_metadata", "stream_options"];
/// Why members that speak of an earlier answer are refused.
const STATELESS: &str = "is not supported: nothing is kept here, so send the whole conversation as \
                         input";

#[derive(Deserialize)]
#[serde(untagged)]
enum ResponsesInput {
    Text(String),
    Items(Vec<ResponsesItem>),
}

#[derive(Deserialize)]
struct ResponsesItem {
    #[serde(default = "message_type")]
    r#type: String,
    #[serde(default)]
    role: String,
    #[serde(default)]
    content: Value,
}

fn message_type() -> String {
    "message".into()
}

pub(super) fn read(mut asked: JsonMembers) -> Result<Question, String> {
    asked.leave_out(&HARMLESS);
    for name in ["previous_response_id", "conversation", "background", "prompt"] {
        asked.take_empty(name, STATELESS)?;
    }
    asked.take_empty("store", "can only be false: nothing is kept here")?;
    asked.take_empty("tools", NO_TOOLS)?;
    asked.take_empty("top_logprobs", "is not supported here: ask /v1/chat/completions for it")?;
    let cuts: Option<String> = asked.take("truncation", "a text")?;
    if cuts.is_some_and(|cuts| cuts != "disabled") {
        return Err("truncation can only be disabled: shorten the conversation yourself.".into());
    }
    effort(&mut asked)?;
    format(&mut asked)?;
    let is_streamed = asked.take("stream", "true or false")?.unwrap_or(false);
    asked.rename("max_output_tokens", "max_tokens");
    let messages = messages(&mut asked)?;
    asked.add("messages", &messages);
    let writer = Box::new(ResponsesWriter::default());
    Ok(Question { chat: asked, writer, is_streamed })
}

/// The effort of thinking goes on as the chat request's; a summary of thoughts there never are is
/// left out.
fn effort(asked: &mut JsonMembers) -> Result<(), String> {
    let reasoning: Value = asked.take("reasoning", "an object")?.unwrap_or_default();
    if !reasoning["effort"].is_null() {
        asked.add("reasoning_effort", &reasoning["effort"]);
    }
    Ok(())
}

fn format(asked: &mut JsonMembers) -> Result<(), String> {
    let text: Option<JsonMembers> = asked.take("text", "an object")?;
    let Some(mut text) = text else { return Ok(()) };
    let verbosity: Option<String> = text.take("verbosity", "a text")?;
    if verbosity.is_some_and(|verbosity| verbosity != "medium") {
        return Err("text.verbosity is not supported: leave it out.".into());
    }
    let format: Option<Map<String, Value>> = text.take("format", "an object")?;
    let Some(mut format) = format else { return Ok(()) };
    let kind = format.shift_remove("type").unwrap_or_default();
    let members = if kind == "json_schema" {
        json!({ "type": kind, "json_schema": format })
    } else {
        json!({ "type": kind })
    };
    asked.add("response_format", &members);
    Ok(())
}

fn messages(asked: &mut JsonMembers) -> Result<Vec<Value>, String> {
    let instructions: Option<String> = asked.take("instructions", "a text")?;
    let mut messages: Vec<Value> =
        instructions.into_iter().map(|text| message("system", text)).collect();
    let input = asked.take("input", "a text or a list of items")?;
    match input.ok_or_else(|| "input is required.".to_owned())? {
        ResponsesInput::Text(text) => messages.push(message("user", text)),
        ResponsesInput::Items(items) => {
            for item in items {
                messages.extend(turn(item)?);
            }
        }
    }
    join_system(&mut messages);
    Ok(messages)
}

/// The message that an item is. Thoughts of earlier answers are left out.
fn turn(item: ResponsesItem) -> Result<Option<Value>, String> {
    match item.r#type.as_str() {
        "message" => {}
        "reasoning" => return Ok(None),
        "function_call" | "function_call_output" => return Err(format!("Tools {NO_TOOLS}.")),
        other => return Err(format!("input items of the type {other} are not supported.")),
    }
    let role = if item.role == "developer" { "system" } else { item.role.as_str() };
    let Value::Array(parts) = item.content else {
        return Ok(Some(message(role, item.content)));
    };
    let texts = parts.iter().map(|part| match part["type"].as_str() {
        Some("input_text" | "output_text" | "text") => Ok(&part["text"]),
        _ => Err(TEXT_ONLY.to_owned()),
    });
    let parts = texts.map(|text| text.map(|text| json!({ "type": "text", "text": text })));
    Ok(Some(message(role, parts.collect::<Result<Vec<_>, _>>()?)))
}

/// Makes one message of the instructions at the beginning: templates know one at most.
fn join_system(messages: &mut Vec<Value>) {
    let is_system = |message: &&Value| message["role"] == "system";
    let count = messages.iter().take_while(is_system).count();
    if count < 2 {
        return;
    }
    let texts = messages.drain(..count).map(|message| plain(&message["content"]));
    let joined = texts.collect::<Vec<_>>().join("\n\n");
    messages.insert(0, message("system", joined));
}

fn plain(content: &Value) -> String {
    let parts = content.as_array().into_iter().flatten().filter_map(|part| part["text"].as_str());
    content.as_str().map_or_else(|| parts.collect(), str::to_owned)
}

#[derive(Debug, Default)]
struct ResponsesWriter {
    /// Events written so far; each carries its number.
    events: u64,
    text: String,
}

impl ResponsesWriter {
    fn event(&mut self, out: &mut String, kind: &str, mut data: Value) {
        data["type"] = kind.into();
        data["sequence_number"] = self.events.into();
        self.events += 1;
        event(out, Some(kind), &data);
    }

    fn response_event(&mut self, out: &mut String, status: &str, response: &Value) {
        self.event(out, &format!("response.{status}"), json!({ "response": response }));
    }

    /// An event about the only part of the only item.
    fn part_event(&mut self, out: &mut String, head: &AnswerHead, kind: &str, mut data: Value) {
        data["item_id"] = item_id(head).into();
        data["output_index"] = 0.into();
        data["content_index"] = 0.into();
        self.event(out, kind, data);
    }
}

fn item_id(head: &AnswerHead) -> String {
    format!("msg_{}", head.id)
}

fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn item(head: &AnswerHead, status: &str, content: &[Value]) -> Value {
    json!({
        "id": item_id(head), "type": "message", "role": "assistant", "status": status,
        "content": content,
    })
}

/// The object that stands for the whole answer, with the members that typed clients expect.
fn response(head: &AnswerHead, status: &str, output: &[Value]) -> Value {
    json!({
        "id": head.id, "object": "response", "created_at": head.created, "status": status,
        "model": head.model, "output": output, "error": null, "incomplete_details": null,
        "instructions": null, "metadata": {}, "parallel_tool_calls": false, "temperature": null,
        "tool_choice": "none", "tools": [], "top_p": null, "usage": null,
    })
}

fn status(end: &AnswerEnd) -> &'static str {
    if end.is_cut_off() { "incomplete" } else { "completed" }
}

fn ended(head: &AnswerHead, text: &str, end: &AnswerEnd) -> Value {
    let status = status(end);
    let mut response = response(head, status, &[item(head, status, &[part(text)])]);
    if end.is_cut_off() {
        response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
    }
    response["usage"] = json!({
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": { "cached_tokens": end.cached_tokens },
        "output_tokens": end.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": 0 },
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    });
    response["credits"] = end.credits.clone();
    response
}

impl AnswerWriter for ResponsesWriter {
    fn begin(&mut self, head: &AnswerHead, out: &mut String) {
        let begun = response(head, "in_progress", &[]);
        self.response_event(out, "created", &begun);
        self.response_event(out, "in_progress", &begun);
        let item = item(head, "in_progress", &[]);
        let added = json!({ "output_index": 0, "item": item });
        self.event(out, "response.output_item.added", added);
        let added = json!({ "part": part("") });
        self.part_event(out, head, "response.content_part.added", added);
    }

    fn text(&mut self, head: &AnswerHead, text: &str, out: &mut String) {
        self.text.push_str(text);
        let delta = json!({ "delta": text, "logprobs": [] });
        self.part_event(out, head, "response.output_text.delta", delta);
    }

    fn end(&mut self, head: &AnswerHead, end: &AnswerEnd, out: &mut String) {
        let text = std::mem::take(&mut self.text);
        let done = json!({ "text": text, "logprobs": [] });
        self.part_event(out, head, "response.output_text.done", done);
        let done = json!({ "part": part(&text) });
        self.part_event(out, head, "response.content_part.done", done);
        let item = item(head, status(end), &[part(&text)]);
        let done = json!({ "output_index": 0, "item": item });
        self.event(out, "response.output_item.done", done);
        self.response_event(out, status(end), &ended(head, &text, end));
    }

    fn fail(&mut self, head: &AnswerHead, error: &UpstreamError, out: &mut String) {
        let mut failed = response(head, "failed", &[]);
        failed["error"] = json!({ "code": error.code, "message": error.message });
        self.response_event(out, "failed", &failed);
    }

    fn whole(&mut self, head: &AnswerHead, text: &str, end: &AnswerEnd) -> Value {
        ended(head, text, end)
    }
}

//! OpenAI's `POST /v1/responses`. Nothing is kept between requests: a client sends the whole
//! conversation each time.

use super::node_events::NodeCall;
use super::{
    AnswerContent, AnswerEnd, AnswerHead, AnswerWriter, EFFORT, JsonMembers, LeftOut, NodePart,
    Question, TEXT_ONLY, UnservedTools, UpstreamError, called, calling, event, message,
    only_function, result,
};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

/// Members without an effect on the text.
const HARMLESS: [&str; 11] = [
    "client_metadata",
    "context_management",
    "include",
    "max_tool_calls",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "stream_options",
    "user",
];
/// Members of the service's own prompts and answers, and why they are refused.
const REFUSED: [(&str, &str); 6] = [
    ("previous_response_id", STATELESS),
    ("conversation", STATELESS),
    ("background", STATELESS),
    ("prompt", STATELESS),
    ("store", "can only be false: nothing is kept here"),
    ("top_logprobs", "is not supported here: ask /v1/chat/completions for it"),
];
/// Items beside these that another service's tools left in a conversation, by their ends.
const OF_TOOLS: [&str; 6] = [
    "_call",
    "_call_output",
    "_list_tools",
    "_approval_request",
    "_approval_response",
    "_snapshot",
];
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
    /// The id of a call, also beside what the function answered.
    #[serde(default, deserialize_with = "text_or_null")]
    call_id: String,
    #[serde(default, deserialize_with = "text_or_null")]
    name: String,
    #[serde(default, deserialize_with = "text_or_null")]
    arguments: String,
    #[serde(default)]
    output: Value,
}

fn text_or_null<'de, D: Deserializer<'de>>(value: D) -> Result<String, D::Error> {
    Option::deserialize(value).map(Option::unwrap_or_default)
}

fn message_type() -> String {
    "message".into()
}

pub(super) fn read(mut asked: JsonMembers) -> Result<Question, String> {
    let mut left_out = LeftOut::default();
    asked.leave_out(&HARMLESS, &mut left_out);
    asked.take_empty(&REFUSED)?;
    tools(&mut asked, &mut left_out)?;
    let cuts: Option<String> = asked.take("truncation", "a text")?;
    if cuts.is_some_and(|cuts| cuts != "disabled") {
        return Err("truncation can only be disabled: shorten the conversation yourself.".into());
    }
    effort(&mut asked, &mut left_out)?;
    format(&mut asked)?;
    let is_streamed = asked.take("stream", "true or false")?.unwrap_or(false);
    asked.rename("max_output_tokens", "max_tokens");
    let messages = messages(&mut asked, &mut left_out)?;
    asked.add("messages", &messages);
    let writer = Box::new(ResponsesWriter::default());
    Ok(Question { chat: asked, writer, is_streamed, left_out, effort: "reasoning.effort" })
}

/// Definitions of functions, and which of them may be called.
fn tools(asked: &mut JsonMembers, left_out: &mut LeftOut) -> Result<(), String> {
    let mut tools: Vec<Value> = asked.take("tools", "a list of tools")?.unwrap_or_default();
    let choice: Value = asked.take("tool_choice", "a text or an object")?.unwrap_or_default();
    let parallel: Option<bool> = asked.take("parallel_tool_calls", "true or false")?;
    let mut unserved = UnservedTools::default();
    tools.retain(|tool| {
        let kind = tool["type"].as_str().unwrap_or("no type");
        if kind != "function" {
            unserved.add(kind, tool["name"].as_str().unwrap_or_default(), left_out);
        }
        kind == "function"
    });
    let kind = choice["type"].as_str().filter(|kind| *kind != "function");
    let chosen = kind.or(choice["name"].as_str()).unwrap_or_default();
    unserved.refuse_choice(chosen, (choice == "required").then_some(tools.len()))?;
    if tools.is_empty() {
        return Ok(());
    }
    let tools: Vec<Value> = tools.into_iter().map(tool).collect();
    asked.add("tools", &tools);
    if let Some(parallel) = parallel {
        asked.add("parallel_tool_calls", &parallel);
    }
    match &choice {
        Value::Null => {}
        Value::Object(_) => asked.add("tool_choice", &only_function(&choice["name"])),
        word => asked.add("tool_choice", word),
    }
    Ok(())
}

fn tool(mut tool: Value) -> Value {
    tool.as_object_mut().and_then(|members| members.shift_remove("type"));
    json!({ "type": "function", "function": tool })
}

/// The effort of thinking goes on as the chat request's; how thoughts are summarised is left out,
/// because they are shown as they are.
fn effort(asked: &mut JsonMembers, left_out: &mut LeftOut) -> Result<(), String> {
    let reasoning: Value = asked.take("reasoning", "an object")?.unwrap_or_default();
    if !reasoning["summary"].is_null() {
        left_out.add("reasoning.summary");
    }
    if !reasoning["effort"].is_null() {
        asked.add(EFFORT, &reasoning["effort"]);
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

fn messages(asked: &mut JsonMembers, left_out: &mut LeftOut) -> Result<Vec<Value>, String> {
    let instructions: Option<String> = asked.take("instructions", "a text")?;
    let mut messages: Vec<Value> =
        instructions.into_iter().map(|text| message("system", text)).collect();
    let input = asked.take("input", "a text or a list of items")?;
    match input.ok_or_else(|| "input is required.".to_owned())? {
        ResponsesInput::Text(text) => messages.push(message("user", text)),
        ResponsesInput::Items(items) => {
            for item in items {
                add_item(&mut messages, item, left_out)?;
            }
        }
    }
    join_system(&mut messages);
    Ok(messages)
}

/// Adds what an item is to the messages: calls in a row are one message. Thoughts of earlier
/// answers are left out, and so is what tools of another service did.
fn add_item(
    messages: &mut Vec<Value>,
    item: ResponsesItem,
    left_out: &mut LeftOut,
) -> Result<(), String> {
    match item.r#type.as_str() {
        "message" => messages.push(turn(item)?),
        "reasoning" => {}
        "function_call" => {
            let call = called(&item.call_id, &item.name, item.arguments);
            let last = messages.last_mut().and_then(|last| last.get_mut("tool_calls"));
            match last.and_then(Value::as_array_mut) {
                Some(calls) => calls.push(call),
                None => messages.push(calling(Value::Null, &[call])),
            }
        }
        "function_call_output" => messages.push(result(&item.call_id, plain(&item.output))),
        other if OF_TOOLS.iter().any(|end| other.ends_with(end)) => {
            left_out.add_member("input[]", other);
        }
        other => return Err(format!("input items of the type {other} are not supported.")),
    }
    Ok(())
}

fn turn(item: ResponsesItem) -> Result<Value, String> {
    let role = if item.role == "developer" { "system" } else { item.role.as_str() };
    let Value::Array(parts) = item.content else {
        return Ok(message(role, item.content));
    };
    let texts = parts.iter().map(|part| match part["type"].as_str() {
        Some("input_text" | "output_text" | "text") => Ok(&part["text"]),
        _ => Err(TEXT_ONLY.to_owned()),
    });
    let parts = texts.map(|text| text.map(|text| json!({ "type": "text", "text": text })));
    Ok(message(role, parts.collect::<Result<Vec<_>, _>>()?))
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
    /// Items that have ended.
    ended: Vec<Value>,
    open: Option<OutputItem>,
}

/// An item of the output, while it grows.
#[derive(Clone, Debug)]
struct OutputItem {
    kind: ItemKind,
    /// Its text, or the arguments of a call.
    text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ItemKind {
    Message,
    Reasoning,
    Call { id: String, name: String },
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

    /// An event about the item that is open.
    fn item_event(&mut self, out: &mut String, head: &AnswerHead, kind: &str, mut data: Value) {
        let Some(open) = &self.open else { return };
        data["item_id"] = open.id(head, self.ended.len()).into();
        data["output_index"] = self.ended.len().into();
        if !matches!(open.kind, ItemKind::Call { .. }) {
            data["content_index"] = 0.into();
        }
        self.event(out, kind, data);
    }

    /// Has an item of this kind open.
    fn open(&mut self, head: &AnswerHead, kind: ItemKind, out: &mut String) {
        if self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.close(head, "completed", out);
        let is_message = kind == ItemKind::Message;
        let item = OutputItem { kind, text: String::new() };
        let (at, begun) = (self.ended.len(), item.begun(head, self.ended.len()));
        self.open = Some(item);
        let added = json!({ "output_index": at, "item": begun });
        self.event(out, "response.output_item.added", added);
        if is_message {
            let added = json!({ "part": part("") });
            self.item_event(out, head, "response.content_part.added", added);
        }
    }

    fn grow(&mut self, head: &AnswerHead, text: &str, out: &mut String) {
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let (kind, data) = match &open.kind {
            ItemKind::Message => ("output_text", json!({ "delta": text, "logprobs": [] })),
            ItemKind::Reasoning => ("reasoning_text", json!({ "delta": text })),
            ItemKind::Call { .. } => ("function_call_arguments", json!({ "delta": text })),
        };
        self.item_event(out, head, &format!("response.{kind}.delta"), data);
    }

    fn close(&mut self, head: &AnswerHead, status: &str, out: &mut String) {
        let Some(OutputItem { kind, text }) = self.open.clone() else { return };
        match &kind {
            ItemKind::Message => {
                let done = json!({ "text": text, "logprobs": [] });
                self.item_event(out, head, "response.output_text.done", done);
                let done = json!({ "part": part(&text) });
                self.item_event(out, head, "response.content_part.done", done);
            }
            ItemKind::Reasoning => {
                let done = json!({ "text": text });
                self.item_event(out, head, "response.reasoning_text.done", done);
            }
            ItemKind::Call { name, .. } => {
                let done = json!({ "name": name, "arguments": text });
                self.item_event(out, head, "response.function_call_arguments.done", done);
            }
        }
        let at = self.ended.len();
        let item = OutputItem { kind, text }.whole(head, at, status);
        self.open = None;
        self.event(out, "response.output_item.done", json!({ "output_index": at, "item": item }));
        self.ended.push(item);
    }
}

impl OutputItem {
    fn id(&self, head: &AnswerHead, at: usize) -> String {
        match self.kind {
            ItemKind::Message => format!("msg_{}", head.id),
            ItemKind::Reasoning => format!("rs_{}", head.id),
            ItemKind::Call { .. } => format!("fc_{}_{at}", head.id),
        }
    }

    /// The item as its first event shows it.
    fn begun(&self, head: &AnswerHead, at: usize) -> Value {
        let mut item = self.whole(head, at, "in_progress");
        if self.kind == ItemKind::Message {
            item["content"] = json!([]);
        }
        item
    }

    fn whole(&self, head: &AnswerHead, at: usize, status: &str) -> Value {
        let (id, text) = (self.id(head, at), &self.text);
        match &self.kind {
            ItemKind::Message => json!({
                "id": id, "type": "message", "role": "assistant", "status": status,
                "content": [part(text)],
            }),
            ItemKind::Reasoning => json!({
                "id": id, "type": "reasoning", "status": status, "summary": [],
                "content": [{ "type": "reasoning_text", "text": text }],
            }),
            ItemKind::Call { id: call, name } => json!({
                "id": id, "type": "function_call", "status": status, "call_id": call,
                "name": name, "arguments": text,
            }),
        }
    }
}

fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
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

fn ended(head: &AnswerHead, output: &[Value], end: &AnswerEnd) -> Value {
    let mut response = response(head, status(end), output);
    if end.is_cut_off() {
        response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
    }
    response["usage"] = json!({
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": { "cached_tokens": end.cached_tokens },
        "output_tokens": end.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": end.reasoning_tokens },
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
    }

    fn part(&mut self, head: &AnswerHead, part: &NodePart, out: &mut String) {
        match part {
            NodePart::Text(text) => {
                self.open(head, ItemKind::Message, out);
                self.grow(head, text, out);
            }
            NodePart::Thought(text) => {
                self.open(head, ItemKind::Reasoning, out);
                self.grow(head, text, out);
            }
            NodePart::Call { id, name } => {
                let (id, name) = (id.clone(), name.clone());
                self.open(head, ItemKind::Call { id, name }, out);
            }
            NodePart::Arguments(more) => self.grow(head, more, out),
            NodePart::Scores(_) => {}
        }
    }

    fn end(&mut self, head: &AnswerHead, end: &AnswerEnd, out: &mut String) {
        self.close(head, status(end), out);
        let output = std::mem::take(&mut self.ended);
        self.response_event(out, status(end), &ended(head, &output, end));
    }

    fn fail(&mut self, head: &AnswerHead, error: &UpstreamError, out: &mut String) {
        let mut failed = response(head, "failed", &[]);
        failed["error"] = json!({ "code": error.code, "message": error.message });
        self.response_event(out, "failed", &failed);
    }

    fn whole(&mut self, head: &AnswerHead, content: &AnswerContent, end: &AnswerEnd) -> Value {
        let AnswerContent { thought, text, calls, .. } = content;
        let mut items = Vec::new();
        let mut add = |kind, text: &String| items.push(OutputItem { kind, text: text.clone() });
        if !thought.is_empty() {
            add(ItemKind::Reasoning, thought);
        }
        if !text.is_empty() || calls.is_empty() {
            add(ItemKind::Message, text);
        }
        for NodeCall { id, name, arguments } in calls {
            add(ItemKind::Call { id: id.clone(), name: name.clone() }, arguments);
        }
        let items = items.iter().enumerate().map(|(at, item)| item.whole(head, at, status(end)));
        ended(head, &items.collect::<Vec<_>>(), end)
    }
}

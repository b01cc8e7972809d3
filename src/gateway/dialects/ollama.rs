//! Ollama's `POST /api/chat` and `/api/generate`: lines of JSON, streamed unless `stream` is false.

#![expect(clippy::disallowed_methods, reason = "answers tell how long they took")]

use super::node_events::NodeCall;
use super::{
    AnswerContent, AnswerEnd, AnswerHead, AnswerWriter, Asked, EFFORT, JsonMembers, LeftOut,
    NodePart, PROMPT, Question, TEXT_ONLY, TURNS, UpstreamError, called, calling, continue_last,
    gap, message, result,
};
use chrono::{DateTime, SecondsFormat, Utc};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::time::Instant;

/// Members and options that say how Ollama runs a model, not what it answers.
const HARMLESS: [&str; 18] = [
    "keep_alive",
    "num_ctx",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "num_batch",
    "num_keep",
    "numa",
    "use_mmap",
    "use_mlock",
    "low_vram",
    "repeat_last_n",
    "vocab_only",
    "f16_kv",
    "logits_all",
    "num_gqa",
    // Of samplers that are off.
    "mirostat_eta",
    "mirostat_tau",
];
/// Options whose value here means that they are off.
const OFF: [(&str, f64); 3] = [("mirostat", 0.0), ("tfs_z", 1.0), ("typical_p", 1.0)];
/// Names of options in the node's terms.
const RENAMED: [(&str, &str); 2] =
    [("repeat_penalty", "repetition_penalty"), ("num_predict", "max_tokens")];
/// Options that the node calls the same.
const SAME: [&str; 8] = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
];

#[derive(Deserialize)]
struct OllamaTurn {
    role: String,
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    images: Option<Vec<Value>>,
    #[serde(default)]
    tool_calls: Option<Vec<OllamaCall>>,
}

#[derive(Deserialize)]
struct OllamaCall {
    function: OllamaFunction,
}

#[derive(Deserialize)]
struct OllamaFunction {
    name: String,
    #[serde(default)]
    arguments: Value,
}

pub(super) fn read_chat(mut asked: JsonMembers) -> Result<Asked, String> {
    let turns: Vec<OllamaTurn> = asked.take("messages", TURNS)?.unwrap_or_default();
    // Calls have no ids here: results come in the order of the calls.
    let id = |number: usize| format!("call{number:05}");
    let (mut messages, mut called_before, mut answered) = (Vec::new(), 0, 0);
    for OllamaTurn { role, content, images, tool_calls } in turns {
        if images.is_some_and(|images| !images.is_empty()) {
            return Err(TEXT_ONLY.into());
        }
        let (content, tool_calls) = (content.unwrap_or_default(), tool_calls.unwrap_or_default());
        if role == "tool" {
            messages.push(result(&id(answered), content));
            answered += 1;
        } else if tool_calls.is_empty() {
            messages.push(message(&role, content));
        } else {
            let ids = (called_before..).map(id);
            let calls: Vec<Value> = ids.zip(tool_calls).map(node_call).collect();
            called_before += calls.len();
            messages.push(calling(content, &calls));
        }
    }
    continue_last(&mut asked, &mut messages);
    question(asked, Some(&messages), OllamaWriter::new(true))
}

fn node_call((id, OllamaCall { function }): (String, OllamaCall)) -> Value {
    // Some clients keep the text that other interfaces have.
    let arguments = match function.arguments {
        Value::Null => "{}".to_owned(),
        Value::String(text) => text,
        arguments => arguments.to_string(),
    };
    called(&id, &function.name, arguments)
}

pub(super) fn read_generate(mut asked: JsonMembers) -> Result<Asked, String> {
    asked.take_empty(&[
        ("images", "are not supported: models here read text only"),
        ("context", "is not supported: send the conversation to /api/chat"),
        ("template", "cannot be chosen: each model has its own"),
    ])?;
    let texts: [String; 2] = [
        asked.take("system", "a text")?.unwrap_or_default(),
        asked.take("prompt", "a text")?.unwrap_or_default(),
    ];
    let suffix: String = asked.take("suffix", "a text")?.unwrap_or_default();
    let is_raw = asked.take("raw", "true or false")?.unwrap_or(false);
    if !suffix.is_empty() || (is_raw && !texts[1].is_empty()) {
        return raw(asked, &texts, &suffix);
    }
    let turns = ["system", "user"].into_iter().zip(texts).filter(|(_, text)| !text.is_empty());
    let messages: Vec<Value> = turns.map(|(role, text)| message(role, text)).collect();
    let has_prompt = messages.last().is_some_and(|last| last["role"] == "user");
    let messages = if has_prompt { &messages[..] } else { &[] };
    question(asked, Some(messages), OllamaWriter::new(false))
}

/// A text without the model's template, or one with a gap before `suffix`.
fn raw(
    mut asked: JsonMembers,
    [system, prompt]: &[String; 2],
    suffix: &str,
) -> Result<Asked, String> {
    if !system.is_empty() {
        return Err("system has no place where there is no template: put it into prompt.".into());
    }
    let whole = Value::from(prompt.as_str());
    asked.add(PROMPT, &if suffix.is_empty() { whole } else { gap(prompt, suffix, &[]) });
    question(asked, None, OllamaWriter::new(false))
}

/// A request without a text only wants the model to be loaded, which the node sees to by itself.
/// One without `messages` has a raw prompt.
fn question(
    mut asked: JsonMembers,
    messages: Option<&[Value]>,
    mut writer: OllamaWriter,
) -> Result<Asked, String> {
    let mut left_out = LeftOut::default();
    asked.leave_out(&HARMLESS, &mut left_out);
    thinking(&mut asked)?;
    let format: Value = asked.take("format", "\"json\" or a schema")?.unwrap_or_default();
    options(&mut asked, &mut left_out)?;
    let is_streamed = asked.take("stream", "true or false")?.unwrap_or(true);
    if messages.is_some_and(<[Value]>::is_empty) {
        let model = asked.text("model").unwrap_or_default();
        let head = AnswerHead { model, created: Utc::now().timestamp(), ..AnswerHead::default() };
        let mut loaded = writer.line(&head, "", true);
        loaded["done_reason"] = "load".into();
        return Ok(Asked::Echo(loaded));
    }
    keep_format(&mut asked, &format);
    if let Some(messages) = messages {
        asked.add("messages", messages);
    }
    let (chat, writer) = (asked, Box::new(writer));
    Ok(Asked::Question(Question { chat, writer, is_streamed, left_out, effort: "think" }))
}

fn keep_format(asked: &mut JsonMembers, format: &Value) {
    match format {
        Value::Null => {}
        Value::String(name) if name.is_empty() => {}
        Value::String(_) => asked.add("response_format", &json!({ "type": "json_object" })),
        schema => asked.add("structured_outputs", &json!({ "json": schema })),
    }
}

/// Whether, or how much, a model thinks.
fn thinking(asked: &mut JsonMembers) -> Result<(), String> {
    let think: Value = asked.take("think", "true, false or a degree")?.unwrap_or_default();
    match &think {
        Value::Null => {}
        Value::Bool(thinks) => {
            asked.add(EFFORT, &if *thinks { "high" } else { "none" });
        }
        degree => asked.add(EFFORT, degree),
    }
    Ok(())
}

/// Makes `options` members of the request.
fn options(asked: &mut JsonMembers, left_out: &mut LeftOut) -> Result<(), String> {
    let options: Map<String, Value> = asked.take("options", "an object")?.unwrap_or_default();
    let mut unknown = Vec::new();
    for (name, value) in options {
        let is_off = OFF.contains(&(name.as_str(), value.as_f64().unwrap_or(f64::NAN)));
        if value.is_null() {
            continue;
        }
        if is_off || HARMLESS.contains(&name.as_str()) {
            left_out.add_member("options", &name);
            continue;
        }
        let renamed = RENAMED.iter().find(|(own, _)| *own == name).map(|(_, other)| *other);
        let same = SAME.contains(&name.as_str()).then_some(name.as_str());
        let Some(known) = renamed.or(same) else {
            unknown.push(format!("options.{name} is not supported: leave it out."));
            continue;
        };
        // A negative number of tokens means as many as there is room for.
        if !(name == "num_predict" && value.as_i64().is_some_and(|count| count < 0)) {
            asked.add(known, &value);
        }
    }
    if unknown.is_empty() { Ok(()) } else { Err(unknown.join(" ")) }
}

pub(super) fn refusal(error: &UpstreamError) -> Value {
    json!({ "error": error.message })
}

/// Writes the lines of `/api/chat`, or those of `/api/generate`.
#[derive(Debug)]
struct OllamaWriter {
    is_chat: bool,
    began: Instant,
    first_text: Option<Instant>,
    /// Calls of tools are told whole.
    calls: AnswerContent,
    /// The log-probabilities of tokens whose text has not been told.
    scores: Vec<Value>,
}

impl OllamaWriter {
    fn new(is_chat: bool) -> Self {
        let calls = AnswerContent::default();
        Self { is_chat, began: Instant::now(), first_text: None, calls, scores: Vec::new() }
    }

    fn line(&mut self, head: &AnswerHead, text: &str, done: bool) -> Value {
        let created = DateTime::<Utc>::from_timestamp(head.created, 0).unwrap_or_default();
        let created = created.to_rfc3339_opts(SecondsFormat::Secs, true);
        let mut line = json!({ "model": head.model, "created_at": created, "done": done });
        if self.is_chat {
            line["message"] = message("assistant", text);
        } else {
            line["response"] = text.into();
        }
        if !self.scores.is_empty() {
            line["logprobs"] = std::mem::take(&mut self.scores).into();
        }
        line
    }

    /// Adds what was thought, and what is called.
    fn add_parts(&self, line: &mut Value, thought: &str, calls: &[NodeCall]) {
        if !thought.is_empty() {
            let place = if self.is_chat { &mut line["message"] } else { &mut *line };
            place["thinking"] = thought.into();
        }
        if !calls.is_empty() {
            line["message"]["tool_calls"] = calls.iter().map(tool_call).collect();
        }
    }

    /// The last line. Times are in nanoseconds.
    fn last(&mut self, head: &AnswerHead, text: &str, end: &AnswerEnd) -> Value {
        let mut line = self.line(head, text, true);
        let first_text = self.first_text.unwrap_or(self.began);
        // Calls are an ordinary end here.
        let reason = if end.is_cut_off() { "length" } else { "stop" };
        line["done_reason"] = reason.into();
        line["total_duration"] = nanoseconds(self.began);
        line["load_duration"] = 0.into();
        line["prompt_eval_count"] = end.prompt_tokens.into();
        line["prompt_eval_duration"] = ((first_text - self.began).as_nanos() as u64).into();
        line["eval_count"] = end.completion_tokens.into();
        line["eval_duration"] = nanoseconds(first_text);
        line["credits"] = end.credits.clone();
        line
    }
}

fn tool_call(call: &NodeCall) -> Value {
    let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
    json!({ "function": { "name": call.name, "arguments": arguments } })
}

fn nanoseconds(since: Instant) -> Value {
    (since.elapsed().as_nanos() as u64).into()
}

fn push_line(out: &mut String, line: &Value) {
    out.push_str(&line.to_string());
    out.push('\n');
}

impl AnswerWriter for OllamaWriter {
    fn content_type(&self) -> &'static str {
        "application/x-ndjson"
    }

    fn part(&mut self, head: &AnswerHead, part: &NodePart, out: &mut String) {
        self.first_text.get_or_insert_with(Instant::now);
        let (text, thought) = match part {
            NodePart::Scores(scores) => return self.scores.extend_from_slice(scores),
            NodePart::Text(text) => (text.as_str(), ""),
            NodePart::Thought(text) => ("", text.as_str()),
            NodePart::Call { .. } | NodePart::Arguments(_) => return self.calls.add(part.clone()),
        };
        let mut line = self.line(head, text, false);
        self.add_parts(&mut line, thought, &[]);
        push_line(out, &line);
    }

    fn end(&mut self, head: &AnswerHead, end: &AnswerEnd, out: &mut String) {
        if !self.calls.calls.is_empty() {
            let mut line = self.line(head, "", false);
            self.add_parts(&mut line, "", &self.calls.calls);
            push_line(out, &line);
        }
        push_line(out, &self.last(head, "", end));
    }

    fn fail(&mut self, _: &AnswerHead, error: &UpstreamError, out: &mut String) {
        push_line(out, &refusal(error));
    }

    /// Clients read every line as JSON, so there is nothing that could be sent.
    fn keep_alive(&mut self, _: &mut String) {}

    fn whole(&mut self, head: &AnswerHead, content: &AnswerContent, end: &AnswerEnd) -> Value {
        self.scores.clone_from(&content.scores);
        let mut whole = self.last(head, &content.text, end);
        self.add_parts(&mut whole, &content.thought, &content.calls);
        whole
    }
}

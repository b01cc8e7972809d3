//! Other services' ways of asking for text. Each is translated to one chat request of the node and
//! its answer back.
//!
//! The node is always asked for a stream, whatever the client wants: whether an answer streams is
//! part of what an idempotency key is bound to, and clients whose stream broke ask again without
//! one. What no model here does is refused; what has no effect is left out and named in the answer;
//! members that are not known go on as they are, and the node refuses them by name.

mod anthropic;
mod completions;
mod llama_cpp;
pub(super) mod model_lists;
mod node_events;
mod ollama;
mod responses;
mod translated;

use super::json_members::JsonMembers;
use super::left_out::LeftOut;
use super::prompts;
use super::thinking::EFFORT;
use super::tools::UnservedTools;
use super::{CONTINUES, PROMPT};
use hyper::header::HeaderName;
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
pub(super) use node_events::UpstreamError;
use node_events::{AnswerContent, AnswerEnd, NodePart};
use serde_json::{Value, json};
use std::fmt::Debug;
pub(super) use translated::{TranslatedStream, whole};

/// The header by which Anthropic's clients are known: both lists of models have one path.
pub(super) const ANTHROPIC: HeaderName = HeaderName::from_static("anthropic-version");
/// What the messages of a conversation are.
const TURNS: &str = "a list of messages with role and content";
/// Why pictures and files are refused by every dialect.
const TEXT_ONLY: &str = "Models here read text only: leave images and files out.";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ApiDialect {
    Completions,
    Responses,
    Anthropic,
    OllamaChat,
    OllamaGenerate,
    LlamaCppCompletion,
    LlamaCppInfill,
}

/// What a client asked, in the node's terms.
pub(super) enum Asked {
    Question(Question),
    /// The gateway answers by itself if it knows the model: nothing is to be generated.
    Echo(Value),
}

pub(super) struct Question {
    /// Members of the node's chat request.
    pub chat: JsonMembers,
    pub writer: Box<dyn AnswerWriter>,
    pub is_streamed: bool,
    pub left_out: LeftOut,
    /// What the client calls how much a model thinks.
    pub effort: &'static str,
}

/// What every part of an answer says of the whole.
#[derive(Clone, Debug, Default)]
pub(super) struct AnswerHead {
    /// The node's id of the request.
    pub id: String,
    /// Unix seconds.
    pub created: i64,
    /// As the client named it.
    pub model: String,
    /// 0 where the node tells them at the end alone.
    pub prompt_tokens: u64,
}

/// Writes the node's answer in one dialect. A stream is written event by event; the whole answer
/// at once.
pub(super) trait AnswerWriter: Debug + Send {
    fn content_type(&self) -> &'static str {
        "text/event-stream"
    }
    /// Written before the first part.
    fn begin(&mut self, _head: &AnswerHead, _out: &mut String) {}
    fn part(&mut self, head: &AnswerHead, part: &NodePart, out: &mut String);
    fn end(&mut self, head: &AnswerHead, end: &AnswerEnd, out: &mut String);
    /// Written when a stream that has begun fails.
    fn fail(&mut self, head: &AnswerHead, error: &UpstreamError, out: &mut String);
    /// Written when nothing has come for a while.
    fn keep_alive(&mut self, out: &mut String) {
        out.push_str(": keep-alive\n\n");
    }
    fn whole(&mut self, head: &AnswerHead, content: &AnswerContent, end: &AnswerEnd) -> Value;
}

impl ApiDialect {
    /// The dialect of a request with this method and path.
    pub(super) fn of(head: &Parts) -> Option<Self> {
        if head.method != Method::POST {
            return None;
        }
        Some(match head.uri.path() {
            "/v1/completions" => Self::Completions,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Anthropic,
            "/api/chat" => Self::OllamaChat,
            "/api/generate" => Self::OllamaGenerate,
            "/completion" => Self::LlamaCppCompletion,
            "/infill" => Self::LlamaCppInfill,
            _ => return None,
        })
    }

    /// The dialect in which a request's errors are answered, if it is not the node's own.
    pub(super) fn of_errors(head: &Parts) -> Option<Self> {
        let path = head.uri.path();
        if path.starts_with("/api/") {
            return Some(Self::OllamaChat);
        }
        let is_anthropic =
            path.starts_with("/v1/messages") || head.headers.contains_key(&ANTHROPIC);
        if is_anthropic { Some(Self::Anthropic) } else { Self::of(head) }
    }

    /// Whose interface a request is addressed to.
    pub(super) fn maker(head: &Parts) -> &'static str {
        match Self::of_errors(head) {
            Some(Self::Anthropic) => "anthropic",
            Some(Self::OllamaChat | Self::OllamaGenerate) => "ollama",
            Some(Self::LlamaCppCompletion | Self::LlamaCppInfill) => "llama.cpp",
            None if prompts::is_asked(head) => "llama.cpp",
            Some(Self::Completions | Self::Responses) | None => "openai",
        }
    }

    /// Whether its clients expect a server with one model, and may name none.
    pub(super) fn has_one_model(self) -> bool {
        matches!(self, Self::LlamaCppCompletion | Self::LlamaCppInfill)
    }

    /// Reads a request's body; the error is a sentence for the client.
    pub(super) fn read(self, body: &[u8]) -> Result<Asked, String> {
        let asked = members(body)?;
        match self {
            Self::Completions => completions::read(asked).map(Asked::Question),
            Self::Responses => responses::read(asked).map(Asked::Question),
            Self::Anthropic => anthropic::read(asked).map(Asked::Question),
            Self::OllamaChat => ollama::read_chat(asked),
            Self::OllamaGenerate => ollama::read_generate(asked),
            Self::LlamaCppCompletion => llama_cpp::read_completion(asked),
            Self::LlamaCppInfill => llama_cpp::read_infill(asked),
        }
    }

    /// An error answer of the node or of the gateway in this dialect.
    pub(super) fn refusal(self, status: StatusCode, error: &UpstreamError) -> (StatusCode, Value) {
        match self {
            Self::Anthropic => anthropic::refusal(status, error),
            Self::OllamaChat | Self::OllamaGenerate => (status, ollama::refusal(error)),
            _ => (status, json!({ "error": error })),
        }
    }
}

pub(super) fn members(body: &[u8]) -> Result<JsonMembers, String> {
    serde_json::from_slice(body).map_err(|_| "The body must be a JSON object.".to_owned())
}

/// What a request for one of Anthropic's messages asks.
pub(super) fn anthropic_question(body: &[u8]) -> Result<Question, String> {
    anthropic::read(members(body)?)
}

/// Adds one server-sent event, with a name where the dialect has names.
fn event(out: &mut String, name: Option<&str>, data: &Value) {
    if let Some(name) = name {
        out.push_str("event: ");
        out.push_str(name);
        out.push('\n');
    }
    out.push_str("data: ");
    out.push_str(&data.to_string());
    out.push_str("\n\n");
}

/// A raw prompt with a gap: the text between two others is asked for, beside further files.
fn gap(prefix: &str, suffix: &str, files: &[Value]) -> Value {
    json!({ "prefix": prefix, "suffix": suffix, "files": files })
}

/// A message of the node's chat request.
fn message(role: &str, content: impl Into<Value>) -> Value {
    json!({ "role": role, "content": content.into() })
}

/// Asks the node to go on with a last message of the assistant. An empty one only says whose turn
/// it is.
fn continue_last(asked: &mut JsonMembers, messages: &mut Vec<Value>) {
    let Some(last) = messages.last().filter(|last| last["role"] == "assistant") else { return };
    let parts = last["content"].as_array().map_or(&[][..], Vec::as_slice);
    let says = |text: &Value| text.as_str().is_some_and(|text| !text.trim().is_empty());
    let has_text = says(&last["content"]) || parts.iter().any(|part| says(&part["text"]));
    if has_text || !last["tool_calls"].is_null() {
        asked.add(CONTINUES, &true);
    } else {
        messages.pop();
    }
}

/// An assistant's message that calls tools. Of the content, `null` is none.
fn calling(content: impl Into<Value>, calls: &[Value]) -> Value {
    json!({ "role": "assistant", "content": content.into(), "tool_calls": calls })
}

/// A call in a message; its arguments are a JSON text.
fn called(id: &str, name: &str, arguments: impl Into<Value>) -> Value {
    let function = json!({ "name": name, "arguments": arguments.into() });
    json!({ "id": id, "type": "function", "function": function })
}

/// The function that has to be called.
fn only_function(name: &Value) -> Value {
    json!({ "type": "function", "function": { "name": name } })
}

/// The answer of a tool.
fn result(id: &str, content: impl Into<Value>) -> Value {
    json!({ "role": "tool", "tool_call_id": id, "content": content.into() })
}

#[cfg(test)]
mod tests;

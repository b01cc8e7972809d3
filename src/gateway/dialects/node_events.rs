//! Reads the node's stream of server-sent events.

use super::AnswerHead;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[derive(Debug)]
pub(crate) enum NodeEvent {
    KeepAlive,
    Text(String),
    End(AnswerEnd),
    Failure(UpstreamError),
}

/// How an answer ended and what it cost.
#[derive(Debug)]
pub(crate) struct AnswerEnd {
    /// `stop` or `length`.
    pub finish_reason: String,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub cached_tokens: u64,
    /// The node's `usage` and `credits`, as it wrote them.
    pub usage: Value,
    pub credits: Value,
}

impl AnswerEnd {
    /// Whether the answer was cut off at the most tokens that were asked for.
    pub(super) fn is_cut_off(&self) -> bool {
        self.finish_reason == "length"
    }
}

/// The object `error` of the node's answers. Members that no dialect reads are kept.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct UpstreamError {
    #[serde(default)]
    pub code: String,
    #[serde(default)]
    pub message: String,
    #[serde(default)]
    pub request_id: String,
    #[serde(flatten)]
    others: Map<String, Value>,
}

impl UpstreamError {
    /// The error in the body of an answer.
    pub(crate) fn of_answer(body: &[u8]) -> Self {
        let answer: Value = serde_json::from_slice(body).unwrap_or_default();
        let error = serde_json::from_value(answer["error"].clone());
        let message = || "The node's answer is no error that is known here.".to_owned();
        error.unwrap_or_else(|_| Self { message: message(), ..Self::default() })
    }
}

/// Splits bytes into events, however they arrive.
#[derive(Debug, Default)]
pub(super) struct NodeEvents {
    /// Bytes of a line whose end has not come.
    line: Vec<u8>,
}

impl NodeEvents {
    /// The events that `data` completes. What they say of the whole answer goes to `head`.
    pub(super) fn take(&mut self, data: &[u8], head: &mut AnswerHead) -> Vec<NodeEvent> {
        let mut events = Vec::new();
        for piece in data.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(piece);
            if self.line.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                events.extend(read(line.trim_ascii_end(), head));
            }
        }
        events
    }
}

fn read(line: &[u8], head: &mut AnswerHead) -> Option<NodeEvent> {
    if line.starts_with(b":") {
        return Some(NodeEvent::KeepAlive);
    }
    // The end of the list, and whatever else is no event, is left out.
    let event: Value = serde_json::from_slice(line.strip_prefix(b"data: ")?).ok()?;
    if let Some(error) = event.get("error") {
        return Some(NodeEvent::Failure(serde_json::from_value(error.clone()).unwrap_or_default()));
    }
    if head.id.is_empty() {
        event["id"].as_str()?.clone_into(&mut head.id);
        head.created = event["created"].as_i64().unwrap_or_default();
    }
    let choice = &event["choices"][0];
    if let Some(reason) = choice["finish_reason"].as_str() {
        return Some(NodeEvent::End(end(reason, &event)));
    }
    let text = choice["delta"]["content"].as_str().unwrap_or_default();
    Some(NodeEvent::Text(text.to_owned()))
}

fn end(reason: &str, event: &Value) -> AnswerEnd {
    let usage = &event["usage"];
    let count = |value: &Value| value.as_u64().unwrap_or_default();
    AnswerEnd {
        finish_reason: reason.to_owned(),
        prompt_tokens: count(&usage["prompt_tokens"]),
        completion_tokens: count(&usage["completion_tokens"]),
        cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"]),
        usage: usage.clone(),
        credits: event["credits"].clone(),
    }
}

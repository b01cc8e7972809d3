//! Reads the node's stream of server-sent events.

use super::AnswerHead;
use crate::REQUEST_ID;
use cresset_base::{EventReader, ServerEvent};
use hyper::StatusCode;
use hyper::http::response::Parts;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[derive(Debug)]
pub(crate) enum NodeEvent {
    KeepAlive,
    Part(NodePart),
    End(AnswerEnd),
    Failure(UpstreamError),
}

/// A piece of an answer.
#[derive(Clone, Debug)]
pub(crate) enum NodePart {
    Text(String),
    /// Text that the model thinks before it answers.
    Thought(String),
    /// The beginning of a call of a tool.
    Call {
        id: String,
        name: String,
    },
    /// More of the latest call's arguments, a JSON text.
    Arguments(String),
    /// The log-probabilities of the tokens of the part that comes next, as the node writes them.
    Scores(Vec<Value>),
}

/// The parts of a whole answer.
#[derive(Debug, Default)]
pub(crate) struct AnswerContent {
    pub thought: String,
    pub text: String,
    pub calls: Vec<NodeCall>,
    pub scores: Vec<Value>,
}

#[derive(Clone, Debug)]
pub(crate) struct NodeCall {
    pub id: String,
    pub name: String,
    pub arguments: String,
}

impl AnswerContent {
    pub(super) fn add(&mut self, part: NodePart) {
        match part {
            NodePart::Text(text) => self.text.push_str(&text),
            NodePart::Thought(text) => self.thought.push_str(&text),
            NodePart::Call { id, name } => {
                self.calls.push(NodeCall { id, name, arguments: String::new() });
            }
            NodePart::Arguments(more) => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&more);
                }
            }
            NodePart::Scores(more) => self.scores.extend(more),
        }
    }
}

/// How an answer ended and what it cost.
#[derive(Debug)]
pub(crate) struct AnswerEnd {
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: String,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub cached_tokens: u64,
    pub reasoning_tokens: u64,
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

const WRONG_KEY: &str = "The key is missing, wrong, expired or revoked: send a key of an account as \
                         Authorization: Bearer … or as x-api-key.";
const UNKNOWN: &str = "The node's answer is no error that is known here.";

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
    /// An answer that is none of the node's errors.
    pub(crate) fn unknown() -> Self {
        Self { message: UNKNOWN.to_owned(), ..Self::default() }
    }

    /// The error in the body of an answer, whose id the head has too.
    pub(crate) fn of_answer(head: &Parts, body: &[u8]) -> Self {
        let answer: Value = serde_json::from_slice(body).unwrap_or_default();
        let mut error: Self = serde_json::from_value(answer["error"].clone()).unwrap_or_default();
        // For a wrong credential the node gives only the code.
        if error.message.is_empty() {
            let is_credential = head.status == StatusCode::UNAUTHORIZED;
            error.message = String::from(if is_credential { WRONG_KEY } else { UNKNOWN });
        }
        if error.request_id.is_empty() {
            let id = head.headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
            error.request_id = id.map(str::to_owned).unwrap_or_default();
        }
        error
    }
}

/// Splits bytes into events, however they arrive.
#[derive(Debug, Default)]
pub(super) struct NodeEvents(EventReader);

impl NodeEvents {
    /// The events that `data` completes. What they say of the whole answer goes to `head`.
    pub(super) fn take(&mut self, data: &[u8], head: &mut AnswerHead) -> Vec<NodeEvent> {
        self.0.push(data);
        let mut events = Vec::new();
        while let Some(event) = self.0.next_event() {
            match event {
                ServerEvent::Comment => events.push(NodeEvent::KeepAlive),
                ServerEvent::Data(data) => read(&data, head, &mut events),
            }
        }
        events
    }
}

fn read(data: &str, head: &mut AnswerHead, events: &mut Vec<NodeEvent>) {
    // The end of the list, and whatever else is no event, is left out.
    let Ok(event) = serde_json::from_str::<Value>(data) else { return };
    if let Some(error) = event.get("error") {
        let error = serde_json::from_value(error.clone()).unwrap_or_default();
        return events.push(NodeEvent::Failure(error));
    }
    if head.id.is_empty() {
        let Some(id) = event["id"].as_str() else { return };
        id.clone_into(&mut head.id);
        head.created = event["created"].as_i64().unwrap_or_default();
    }
    let choice = &event["choices"][0];
    if let Some(scores) = choice["logprobs"]["content"].as_array().filter(|all| !all.is_empty()) {
        events.push(NodeEvent::Part(NodePart::Scores(scores.clone())));
    }
    match choice["finish_reason"].as_str() {
        Some(reason) => events.push(NodeEvent::End(end(reason, &event))),
        None => events.extend(part(&choice["delta"]).map(NodeEvent::Part)),
    }
}

/// The piece that a delta has, if it is not empty.
fn part(delta: &Value) -> Option<NodePart> {
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let call = &delta["tool_calls"][0];
    let begun = text(&call["id"]).zip(text(&call["function"]["name"]));
    begun
        .map(|(id, name)| NodePart::Call { id, name })
        .or_else(|| text(&call["function"]["arguments"]).map(NodePart::Arguments))
        .or_else(|| text(&delta["reasoning_content"]).map(NodePart::Thought))
        .or_else(|| text(&delta["content"]).map(NodePart::Text))
}

fn end(reason: &str, event: &Value) -> AnswerEnd {
    let usage = &event["usage"];
    let count = |value: &Value| value.as_u64().unwrap_or_default();
    AnswerEnd {
        finish_reason: reason.to_owned(),
        prompt_tokens: count(&usage["prompt_tokens"]),
        completion_tokens: count(&usage["completion_tokens"]),
        cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"]),
        reasoning_tokens: count(&usage["completion_tokens_details"]["reasoning_tokens"]),
        usage: usage.clone(),
        credits: event["credits"].clone(),
    }
}

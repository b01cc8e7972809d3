//! The completions surface of the subject without a model, in the dialects of several engines, with
//! the mistakes that such engines have.

use super::fake::{Fake, VOCABULARY, certain, token_bytes};
use crate::checks::due_calls;
use crate::subject::{
    ApiAnswer, ApiManner, ChatTurn, PositionLogprob, Request, Result, Subject, SubjectError,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// How an endpoint answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// As this node does.
    #[default]
    Own,
    /// Another engine: CRLF and comments in streams, no `ignore_eos`, small margins decided
    /// otherwise.
    Foreign,
    /// Neither log-probabilities nor biases, and no usage in streams.
    Sparse,
    /// Special tokens in a message become their ids.
    SpecialParsed,
    /// Another template.
    OtherTemplate,
    /// Prompts over the context lose their beginning.
    Cuts,
    /// An assistant's message at the end is gone on with.
    GoesOn,
}

impl Dialect {
    pub(super) fn manner(self) -> ApiManner {
        match self {
            Self::Own => ApiManner::own(),
            _ => ApiManner { foreign: true, neutral: json!({}), ignore_eos: false },
        }
    }
}

/// A tenant that no check uses.
const API: u32 = 1_000;

struct Answer {
    pieces: Vec<String>,
    /// Each token's text, and its log-probability.
    tokens: Vec<(u32, PositionLogprob)>,
    finish: &'static str,
    prompt_tokens: usize,
}

impl Fake {
    pub(super) fn answer(&mut self, body: &Value) -> Result<ApiAnswer> {
        let refused = |why: &str| {
            let body = json!({ "error": { "message": why } }).to_string().into_bytes();
            Ok(ApiAnswer { status: 400, body })
        };
        if let Some(answer) = called(body) {
            return Ok(ApiAnswer { status: 200, body: answer.to_string().into_bytes() });
        }
        let sparse = self.dialect() == Dialect::Sparse;
        if sparse && (body["logprobs"] == true || body["logit_bias"].is_object()) {
            return refused("not supported");
        }
        let ids = body["logit_bias"].as_object().into_iter().flatten();
        if ids.filter_map(|(id, _)| id.parse().ok()).any(|id: u32| id >= VOCABULARY) {
            return refused("no such token");
        }
        if self.dialect() != Dialect::Own && body["ignore_eos"] == true {
            return refused("unknown member ignore_eos");
        }
        let mut prompt = self.prompt(body)?;
        if prompt.len() >= self.context_tokens() as usize {
            if self.dialect() != Dialect::Cuts {
                return refused("too long");
            }
            prompt.truncate(100);
        }
        let answer = self.complete(&prompt, body)?;
        let text = if body["stream"] == true {
            self.stream(&answer, body)
        } else {
            Self::plain(&answer, body).to_string()
        };
        Ok(ApiAnswer { status: 200, body: text.into_bytes() })
    }

    fn prompt(&mut self, body: &Value) -> Result<Vec<u32>> {
        let failed = |error: serde_json::Error| SubjectError::Failed(error.to_string());
        let mut messages: Vec<ChatTurn> =
            serde_json::from_value(body["messages"].clone()).map_err(failed)?;
        let last = messages.last().filter(|message| message.role == "assistant").cloned();
        match (self.dialect(), last) {
            (Dialect::GoesOn, Some(last)) => {
                messages.pop();
                let before = self.encode_chat(&messages)?;
                Ok([before, self.encode(&last.content, false)?].concat())
            }
            (Dialect::SpecialParsed, _) => {
                let text = self.render(&messages)?;
                self.encode(&text, true)
            }
            (Dialect::OtherTemplate, _) => {
                Ok([self.encode_chat(&messages)?, self.encode("answer: ", false)?].concat())
            }
            _ => self.encode_chat(&messages),
        }
    }

    /// Generates token by token; penalties and a narrow nucleus are made of biases and a
    /// temperature.
    fn complete(&mut self, prompt: &[u32], body: &Value) -> Result<Answer> {
        let number = |name: &str| body[name].as_f64().unwrap_or(0.0) as f32;
        let narrow = body["top_p"].as_f64().is_some_and(|share| share < 0.01);
        let temperature = if narrow { 0.0 } else { number("temperature") };
        let limit = body["max_tokens"].as_u64().unwrap_or(16);
        let stops: Vec<&str> =
            body["stop"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let mut answer = Answer {
            pieces: Vec::new(),
            tokens: Vec::new(),
            finish: "length",
            prompt_tokens: prompt.len(),
        };
        let (mut sequence, mut pending) = (prompt.to_vec(), Vec::new());
        let mut said: BTreeMap<u32, f32> = BTreeMap::new();
        for _ in 0..limit {
            let mut bias: Vec<(u32, f32)> = Vec::new();
            for (id, by) in body["logit_bias"].as_object().into_iter().flatten() {
                bias.push((id.parse().unwrap_or(0), by.as_f64().unwrap_or(0.0) as f32));
            }
            let penalty =
                |count: f32| -number("presence_penalty") - count * number("frequency_penalty");
            bias.extend(said.iter().map(|(id, count)| (*id, penalty(*count))));
            let request = Request {
                temperature,
                seed: body["seed"].as_u64().unwrap_or(0),
                bias,
                ..Request::greedy(API, &sequence, 1)
            };
            let mut one = self.one(&request)?;
            let (token, logprob) = (one.tokens.remove(0), one.logprobs.remove(0));
            sequence.push(token);
            *said.entry(token).or_default() += 1.0;
            answer.tokens.push((token, logprob));
            if body["ignore_eos"] != true && self.eos_ids().contains(&token) {
                answer.finish = "stop";
                break;
            }
            pending.extend(token_bytes(token, true));
            answer.pieces.push(certain(&mut pending));
            let text = answer.pieces.concat();
            if let Some(at) = stops.iter().filter_map(|stop| text.find(stop)).min() {
                answer.pieces = vec![text[..at].to_owned()];
                answer.finish = "stop";
                return Ok(answer);
            }
        }
        answer.pieces.push(String::from_utf8_lossy(&pending).into_owned());
        Ok(answer)
    }

    fn usage(answer: &Answer) -> Value {
        let (prompt, completion) = (answer.prompt_tokens, answer.tokens.len());
        json!({ "prompt_tokens": prompt, "completion_tokens": completion,
                "total_tokens": prompt + completion })
    }

    fn logprobs(answer: &Answer, body: &Value) -> Value {
        if body["logprobs"] != true {
            return Value::Null;
        }
        let most = body["top_logprobs"].as_u64().unwrap_or(0) as usize;
        let text = |id: u32| String::from_utf8_lossy(&token_bytes(id, false)).into_owned();
        let entry = |(id, found): &(u32, PositionLogprob)| {
            let top = found.top.iter().take(most);
            let top = top.map(|(id, value)| json!({ "token": text(*id), "logprob": value }));
            json!({ "token": text(*id), "logprob": found.chosen,
                    "top_logprobs": top.collect::<Vec<_>>() })
        };
        json!({ "content": answer.tokens.iter().map(entry).collect::<Vec<_>>() })
    }

    fn plain(answer: &Answer, body: &Value) -> Value {
        json!({
            "choices": [{
                "index": 0,
                "message": { "role": "assistant", "content": answer.pieces.concat() },
                "logprobs": Self::logprobs(answer, body),
                "finish_reason": answer.finish,
            }],
            "usage": Self::usage(answer),
        })
    }

    fn stream(&self, answer: &Answer, body: &Value) -> String {
        let delta = |delta: Value, finish: Value| {
            let choice = json!({ "index": 0, "delta": delta, "finish_reason": finish });
            json!({ "choices": [choice] })
        };
        let mut chunks = vec![delta(json!({ "role": "assistant", "content": "" }), Value::Null)];
        let pieces = answer.pieces.iter();
        chunks.extend(pieces.map(|piece| delta(json!({ "content": piece }), Value::Null)));
        chunks.push(delta(json!({}), answer.finish.into()));
        if body["stream_options"]["include_usage"] == true && self.dialect() != Dialect::Sparse {
            chunks.push(json!({ "choices": [], "usage": Self::usage(answer) }));
        }
        let chunks = chunks.iter().map(Value::to_string).chain(["[DONE]".to_owned()]);
        match self.dialect() {
            Dialect::Own => events(chunks, "data: ", "\n\n"),
            _ => events(chunks, ": ping\r\n\r\ndata:", "\r\n\r\n"),
        }
    }
}

/// The answer to a request that demands a call: the first tool with what its schema allows first;
/// or to one of the conversations that the fake knows by heart.
fn called(body: &Value) -> Option<Value> {
    let answer = |calls: Vec<Value>| {
        let reason = if calls.is_empty() { "stop" } else { "tool_calls" };
        let message = json!({ "role": "assistant", "content": null, "tool_calls": calls });
        json!({ "choices": [{ "message": message, "finish_reason": reason }] })
    };
    if body.get("tool_choice").is_none() {
        return due_calls(body).map(answer);
    }
    let tool = &body["tools"][0]["function"];
    let properties = tool["parameters"]["properties"].as_object()?;
    let arguments =
        properties.iter().map(|(name, schema)| (name.clone(), schema["enum"][0].clone()));
    let arguments = Value::Object(arguments.collect()).to_string();
    let function = json!({ "name": tool["name"], "arguments": arguments });
    Some(answer(vec![json!({ "id": "c", "type": "function", "function": function })]))
}

fn events(chunks: impl Iterator<Item = String>, before: &str, after: &str) -> String {
    chunks.fold(String::new(), |all, chunk| all + before + &chunk + after)
}

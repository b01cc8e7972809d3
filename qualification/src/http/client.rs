//! One completion over HTTP: the request's body, and the answer in every dialect that is read.

use crate::checks::CheckInput;
use crate::subject::{ApiAnswer, ApiManner, ChatTurn, Result, SubjectError};
use cresset_base::EventReader;
use serde_json::{Value, json};

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Reply {
    pub text: String,
    pub finish: Option<String>,
    pub usage: Option<ApiUsage>,
    /// The answer's tokens; `None` when no log-probabilities came.
    pub tokens: Option<Vec<ReplyToken>>,
    /// The text as it was streamed.
    pub pieces: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ApiUsage {
    pub prompt: u64,
    pub completion: u64,
    pub total: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct ReplyToken {
    pub logprob: f64,
    /// Text and log-probability of the most likely tokens, in the answer's order.
    pub top: Vec<(String, f64)>,
}

/// One message of a user about `topic`.
pub(super) fn question(topic: &str) -> Vec<ChatTurn> {
    vec![ChatTurn::new("user", &format!("Tell me something about {topic}."))]
}

impl CheckInput<'_> {
    /// Asks for a greedy answer, with `more` members in the body.
    pub(super) fn ask(&mut self, messages: &[ChatTurn], more: Value) -> Result<Reply> {
        let manner = self.subject.api_manner();
        let mut body = json!({ "messages": messages, "temperature": 0.0, "top_p": 1.0 });
        members(&mut body, manner.neutral.clone());
        members(&mut body, more);
        let streamed = body["stream"] == true;
        let ApiAnswer { status, body } = self.subject.call_api(&body)?;
        if !(200..300).contains(&status) {
            return Err(SubjectError::Refused(format!("HTTP {status}: {}", message(&body))));
        }
        if streamed { read_stream(&body) } else { read_plain(&body) }
    }

    /// `ask` for something that another endpoint need not offer.
    pub(super) fn ask_for(
        &mut self,
        what: &str,
        messages: &[ChatTurn],
        more: Value,
    ) -> Result<Reply> {
        let foreign = self.subject.api_manner().foreign;
        self.ask(messages, more).map_err(|error| match error {
            SubjectError::Refused(why) if foreign => {
                SubjectError::Unavailable(format!("the endpoint does not take {what}: {why}"))
            }
            other => other,
        })
    }

    /// The greedy answer, if asking again gives it again. A foreign engine may round otherwise
    /// where it has the prompt in its cache.
    pub(super) fn steady(&mut self, messages: &[ChatTurn], more: &Value) -> Result<Reply> {
        let first = self.ask(messages, more.clone())?;
        if self.subject.api_manner().foreign && self.ask(messages, more.clone())?.text != first.text
        {
            let why = "a repeated greedy request has another answer";
            return Err(SubjectError::Unavailable(why.into()));
        }
        Ok(first)
    }

    /// Members that ask for `max_tokens` tokens, past end-of-text where the surface can do that.
    pub(super) fn long(&self, max_tokens: u32) -> Value {
        let mut body = json!({ "max_tokens": max_tokens });
        let ApiManner { ignore_eos, .. } = self.subject.api_manner();
        if ignore_eos {
            body["ignore_eos"] = true.into();
        }
        body
    }
}

/// Adds or replaces members of a body.
pub(super) fn members(body: &mut Value, more: Value) {
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
}

pub(super) fn with(mut body: Value, more: Value) -> Value {
    members(&mut body, more);
    body
}

/// The reason that an error's body gives, cut where it is long.
fn message(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body).into_owned();
    let told = serde_json::from_slice::<Value>(body).ok().and_then(|body| {
        let [error, detail] = ["error", "detail"].map(|name| &body[name]);
        let found = error["message"].as_str().or(error.as_str()).or(detail.as_str());
        found.map(str::to_owned)
    });
    told.unwrap_or(text).chars().filter(|c| !c.is_control()).take(200).collect()
}

fn unreadable(why: impl std::fmt::Display) -> SubjectError {
    SubjectError::Failed(format!("its answer cannot be read: {why}"))
}

fn read_plain(body: &[u8]) -> Result<Reply> {
    let body: Value = serde_json::from_slice(body).map_err(unreadable)?;
    let choice = &body["choices"][0];
    let text = choice["message"]["content"].as_str().unwrap_or_default().to_owned();
    if !choice["message"].is_object() {
        return Err(unreadable("it has no choices[0].message"));
    }
    Ok(Reply {
        pieces: vec![text.clone()],
        text,
        finish: choice["finish_reason"].as_str().map(str::to_owned),
        usage: usage(&body),
        tokens: tokens(&choice["logprobs"]),
    })
}

fn read_stream(body: &[u8]) -> Result<Reply> {
    let text = std::str::from_utf8(body).map_err(unreadable)?;
    if text.trim_start().starts_with('{') {
        return Err(SubjectError::Unavailable("the endpoint does not stream".into()));
    }
    let mut reply = Reply::default();
    let mut ended = false;
    let mut events = EventReader::default();
    events.push(body);
    // The last event may have no end.
    events.push(b"\n\n");
    while let Some(data) = events.next_data() {
        if data == "[DONE]" {
            ended = true;
            break;
        }
        let chunk: Value = serde_json::from_str(&data).map_err(unreadable)?;
        if !chunk["error"].is_null() {
            return Err(SubjectError::Failed(format!("the stream failed: {}", chunk["error"])));
        }
        reply.add(&chunk);
    }
    if !ended || reply.finish.is_none() {
        return Err(unreadable("the stream ended without finish_reason and [DONE]"));
    }
    Ok(reply)
}

impl Reply {
    fn add(&mut self, chunk: &Value) {
        self.usage = usage(chunk).or(self.usage);
        let choice = &chunk["choices"][0];
        if let Some(piece) = choice["delta"]["content"].as_str().filter(|piece| !piece.is_empty()) {
            self.text.push_str(piece);
            self.pieces.push(piece.to_owned());
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish = Some(reason.to_owned());
        }
        if let Some(more) = tokens(&choice["logprobs"]) {
            self.tokens.get_or_insert_default().extend(more);
        }
    }

    /// Whether the answer ended at its limit rather than by itself.
    pub(super) fn at_limit(&self) -> bool {
        self.finish.as_deref() == Some("length")
    }

    pub(super) fn counted(&self) -> Result<ApiUsage> {
        self.usage.ok_or_else(|| SubjectError::Unavailable("its answers have no usage".into()))
    }
}

fn usage(body: &Value) -> Option<ApiUsage> {
    let count = |name: &str| body["usage"][name].as_u64();
    let (prompt, completion) = (count("prompt_tokens")?, count("completion_tokens")?);
    Some(ApiUsage { prompt, completion, total: count("total_tokens")? })
}

/// Log-probabilities in the form of chat completions, or in that of the older text completions.
fn tokens(logprobs: &Value) -> Option<Vec<ReplyToken>> {
    if let Some(content) = logprobs["content"].as_array() {
        let token = |entry: &Value| ReplyToken {
            logprob: entry["logprob"].as_f64().unwrap_or(f64::NAN),
            top: entry["top_logprobs"].as_array().into_iter().flatten().map(candidate).collect(),
        };
        return Some(content.iter().map(token).collect());
    }
    let values = logprobs["token_logprobs"].as_array()?;
    let token = |(at, value): (usize, &Value)| ReplyToken {
        logprob: value.as_f64().unwrap_or(f64::NAN),
        top: logprobs["top_logprobs"][at]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(text, value)| (text.clone(), value.as_f64().unwrap_or(f64::NAN)))
            .collect(),
    };
    Some(values.iter().enumerate().map(token).collect())
}

fn candidate(entry: &Value) -> (String, f64) {
    let text = entry["token"].as_str().unwrap_or_default().to_owned();
    (text, entry["logprob"].as_f64().unwrap_or(f64::NAN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_a_refusal_is_found() {
        let check = |body: &str, expect: &str| assert_eq!(message(body.as_bytes()), expect);
        check(r#"{"error":{"message":"too long","code":1}}"#, "too long");
        check(r#"{"error":"too long"}"#, "too long");
        check(r#"{"detail":"too long"}"#, "too long");
        check("<html>\n502", "<html>502");
    }

    #[test]
    fn older_log_probabilities_are_read() {
        let found = tokens(&json!({ "tokens": ["a"], "token_logprobs": [-0.5],
            "top_logprobs": [{ "a": -0.5, "b": -1.5 }] }));
        let top = vec![("a".to_owned(), -0.5), ("b".to_owned(), -1.5)];
        assert_eq!(found, Some(vec![ReplyToken { logprob: -0.5, top }]));
        assert_eq!(tokens(&Value::Null), None);
    }

    #[test]
    fn a_stream_that_breaks_off_is_no_answer() {
        let choice = json!({ "delta": { "content": "a" }, "finish_reason": "stop" });
        let whole = format!("data: {}\n\ndata: [DONE]\n\n", json!({ "choices": [choice] }));
        assert_eq!(read_stream(whole.as_bytes()).unwrap().text, "a");
        assert!(read_stream(&whole.as_bytes()[..whole.len() - 10]).is_err());
        let unavailable = read_stream(br#"{"choices":[]}"#);
        assert!(matches!(unavailable, Err(SubjectError::Unavailable(_))));
    }
}

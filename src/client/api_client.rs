//! A client of a node's public surface: one streamed chat completion, exactly as any other client
//! would ask for it, and the account behind the key.

use crate::ClientError;
use crate::http::{HttpCall, accepted, json, refusal};
use bytes::Bytes;
use cresset_base::EventReader;
use cresset_tls::NodeAddress;
use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Body;
use serde_json::{Value, json};
use uuid::Uuid;

/// The node to ask, and the key, model and conversation to ask with.
#[derive(Clone, Debug)]
pub struct ApiClient {
    pub node: NodeAddress,
    pub secret: String,
    /// Model id.
    pub model: String,
    /// The conversation.
    pub session: Uuid,
}

/// A whole answer and its cost.
#[derive(Clone, Debug)]
pub struct ChatAnswer {
    pub request: Uuid,
    pub text: String,
    pub usage: Value,
    /// Microcredits.
    pub charged: u64,
}

impl ApiClient {
    /// Asks, and calls `on_text` with each piece of text as it arrives.
    pub async fn ask<E: From<ClientError>>(
        &self,
        messages: &[Value],
        options: &Value,
        mut on_text: impl FnMut(&str) -> Result<(), E>,
    ) -> Result<ChatAnswer, E> {
        let mut body = json!({ "model": self.model, "messages": messages });
        merge(&mut body, options);
        let (request, call) = completion(&self.secret, self.session, body);
        let mut answer = AnswerStream::of(request, call.send(&self.node).await?).await?;
        while let Some(text) = answer.next().await? {
            on_text(&text)?;
        }
        Ok(answer.into_answer())
    }

    /// Reads what belongs to the key, such as `/v1/me`.
    pub async fn get(&self, path: &str) -> Result<Value, ClientError> {
        accepted(HttpCall::get(path).bearer(&self.secret).send(&self.node).await?).await
    }
}

/// The call for a streamed completion under a new request id.
pub fn completion(secret: &str, session: Uuid, mut body: Value) -> (Uuid, HttpCall) {
    let request = Uuid::new_v4();
    body["stream"] = true.into();
    let call = HttpCall::post("/v1/chat/completions", &body)
        .bearer(secret)
        .header("idempotency-key", request.to_string())
        .header("x-service-session-id", session.to_string());
    (request, call)
}

/// An answer while it arrives.
pub struct AnswerStream<B> {
    body: B,
    events: EventReader,
    answer: ChatAnswer,
}

impl<B> AnswerStream<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    /// The stream of a response; a refusal is an error.
    pub async fn of(request: Uuid, response: Response<B>) -> Result<Self, ClientError> {
        if !response.status().is_success() {
            let (status, body) = json(response).await?;
            return Err(refusal(status, &body));
        }
        let answer = ChatAnswer { request, text: String::new(), usage: Value::Null, charged: 0 };
        Ok(Self { body: response.into_body(), events: EventReader::default(), answer })
    }

    /// The next piece of text; `None` once the answer is whole and its charge is booked.
    pub async fn next(&mut self) -> Result<Option<String>, ClientError> {
        loop {
            while let Some(data) = self.events.next_data() {
                if data == "[DONE]" {
                    return Ok(None);
                }
                let chunk: Value = serde_json::from_str(&data).map_err(ClientError::new)?;
                let text = self.answer.add_chunk(&chunk)?;
                if !text.is_empty() {
                    return Ok(Some(text.to_owned()));
                }
            }
            let Some(frame) = self.body.frame().await else {
                let shown = format!("cresset requests show {}", self.answer.request);
                let what = "the answer's stream ended before it was done";
                return Err(ClientError::new(what).remedy(shown));
            };
            let frame =
                frame.map_err(|error| ClientError::new(format!("the stream broke: {error}")))?;
            self.events.push(frame.data_ref().map_or(&[][..], |data| data));
        }
    }

    /// What has arrived.
    pub fn into_answer(self) -> ChatAnswer {
        self.answer
    }
}

impl ChatAnswer {
    /// Adds one chunk and returns its text.
    fn add_chunk<'a>(&mut self, chunk: &'a Value) -> Result<&'a str, ClientError> {
        if let Some(error) = chunk.get("error") {
            let message = error["message"]
                .as_str()
                .or(error["code"].as_str())
                .unwrap_or("the generation failed");
            return Err(ClientError::new(message)
                .remedy("nothing was charged; the node's log has the reason"));
        }
        if let Some(usage) = chunk.get("usage").filter(|usage| usage.is_object()) {
            self.usage = usage.clone();
        }
        if let Some(charged) = chunk["credits"]["chargedUnits"].as_str() {
            self.charged = charged.parse().map_err(ClientError::new)?;
        }
        let text = chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
        self.text.push_str(text);
        Ok(text)
    }
}

fn merge(body: &mut Value, options: &Value) {
    for (name, value) in options.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_add_up_to_an_answer() {
        let chunks = [
            json!({ "choices": [{ "delta": { "role": "assistant", "content": "" } }] }),
            json!({ "choices": [{ "delta": { "content": "Par" } }] }),
            json!({ "choices": [{ "delta": { "content": "is" } }] }),
            json!({ "choices": [{ "delta": {}, "finish_reason": "stop" }],
                    "usage": { "prompt_tokens": 3 }, "credits": { "chargedUnits": "7" } }),
        ];
        let mut answer = ChatAnswer {
            request: Uuid::nil(),
            text: String::new(),
            usage: Value::Null,
            charged: 0,
        };
        for chunk in &chunks {
            answer.add_chunk(chunk).unwrap();
        }
        assert_eq!((answer.text.as_str(), answer.charged), ("Paris", 7));
        assert_eq!(answer.usage["prompt_tokens"], 3);
        let failure = answer.add_chunk(&json!({ "error": { "code": "draining" } })).unwrap_err();
        assert_eq!(failure.to_string(), "draining");
    }
}

//! A client of a node's public surface: one streamed chat completion, exactly as any other client
//! would ask for it, and the account behind the key.

use super::http::{EventStream, HttpCall, accepted, json, refusal};
use super::output::{CommandError, CommandResult};
use cresset_tls::NodeAddress;
use serde_json::{Value, json};
use uuid::Uuid;

/// The node to ask, and the key, model and conversation to ask with.
#[derive(Clone, Debug)]
pub(crate) struct ApiClient {
    pub node: NodeAddress,
    pub secret: String,
    /// Model id.
    pub model: String,
    /// The conversation.
    pub session: Uuid,
}

/// A whole answer and its cost.
#[derive(Clone, Debug)]
pub(crate) struct ChatAnswer {
    pub request: Uuid,
    pub text: String,
    pub usage: Value,
    /// Microcredits.
    pub charged: u64,
}

impl ApiClient {
    /// Asks, and calls `on_text` with each piece of text as it arrives.
    pub(crate) async fn ask(
        &self,
        messages: &[Value],
        options: &Value,
        mut on_text: impl FnMut(&str) -> CommandResult,
    ) -> CommandResult<ChatAnswer> {
        let request = Uuid::new_v4();
        let mut body = json!({ "model": self.model, "messages": messages, "stream": true });
        merge(&mut body, options);
        let call = HttpCall::post("/v1/chat/completions", &body)
            .bearer(&self.secret)
            .header("idempotency-key", request.to_string())
            .header("x-service-session-id", self.session.to_string());
        let response = call.send(&self.node).await?;
        if !response.status().is_success() {
            let (status, body) = json(response).await?;
            return Err(refusal(status, &body));
        }
        let mut answer =
            ChatAnswer { request, text: String::new(), usage: Value::Null, charged: 0 };
        let mut events = EventStream::new(response);
        while let Some(data) = events.next().await? {
            if data == "[DONE]" {
                return Ok(answer);
            }
            let chunk: Value = serde_json::from_str(&data).map_err(CommandError::new)?;
            on_text(answer.add_chunk(&chunk)?)?;
        }
        Err(CommandError::new("the answer's stream ended before it was done")
            .remedy(format!("cresset requests show {request}")))
    }

    /// Reads what belongs to the key, such as `/v1/me`.
    pub(crate) async fn get(&self, path: &str) -> CommandResult<Value> {
        accepted(HttpCall::get(path).bearer(&self.secret).send(&self.node).await?).await
    }
}

impl ChatAnswer {
    /// Adds one chunk and returns its text.
    fn add_chunk<'a>(&mut self, chunk: &'a Value) -> CommandResult<&'a str> {
        if let Some(error) = chunk.get("error") {
            let message = error["message"]
                .as_str()
                .or(error["code"].as_str())
                .unwrap_or("the generation failed");
            return Err(CommandError::new(message)
                .remedy("nothing was charged; the node's log has the reason"));
        }
        if let Some(usage) = chunk.get("usage").filter(|usage| usage.is_object()) {
            self.usage = usage.clone();
        }
        if let Some(charged) = chunk["credits"]["chargedUnits"].as_str() {
            self.charged = charged.parse().map_err(CommandError::new)?;
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

//! Anthropic's `POST /v1/messages/count_tokens`: the tokens of the prompt that a request for a
//! message would have. `/v1` has no request for that, so a node gives its own gateway a router that
//! counts, and a gateway in a process of its own has none.

use super::answer::{GatewayBody, known, whole};
use super::dialects;
use super::log_line::GatewayLine;
use super::upstream::{NodeConnections, asked_here, collected};
use super::{Gateway, GatewayRefusal, refuse};
use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode};
use serde_json::{Value, json};

const COUNT: &str = "/v1/messages/count_tokens";

pub(super) fn is_asked(head: &Parts) -> bool {
    head.method == Method::POST && head.uri.path() == COUNT
}

impl Gateway {
    pub(super) async fn count(
        &self,
        mut head: Parts,
        body: &Bytes,
        line: &mut GatewayLine,
    ) -> Result<Response<GatewayBody>, GatewayRefusal> {
        let NodeConnections::Here { counter, .. } = &self.node else {
            let why = "a relay cannot count tokens, because /v1 has no request for that: ask the \
                       gateway in the node (gateway.listen)";
            return Err(refuse(StatusCode::NOT_FOUND, why, false).into());
        };
        self.complete(&mut head.headers)?;
        let question = dialects::anthropic_question(body);
        let question = question.map_err(|why| refuse(StatusCode::BAD_REQUEST, &why, false))?;
        line.left_out = question.left_out;
        let (body, _) = self.translate(&mut head, question.chat, question.effort, line).await?;
        head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let answer = asked_here(counter, &head, &body).await;
        let (head, body) = collected(answer).await?.into_parts();
        let count = serde_json::from_slice::<Value>(&body).unwrap_or_default();
        Ok(match count["prompt_tokens"].as_u64() {
            Some(tokens) => known(&json!({ "input_tokens": tokens })),
            None => whole(head, body),
        })
    }
}

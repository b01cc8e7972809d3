//! Anthropic's `POST /v1/messages/count_tokens`: the tokens of the prompt that a request for a
//! message would have. `/v1` has no request for that, so a node gives its own gateway a router that
//! counts, and a gateway in a process of its own has none.

use super::answer::{GatewayBody, known, whole};
use super::dialects;
use super::log_line::GatewayLine;
use super::{Gateway, GatewayRefusal, refuse};
use axum::body::Body;
use bytes::Bytes;
use http_body_util::{BodyExt, Collected};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};
use tower::ServiceExt;

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
        let Some(counter) = &self.counter else {
            let why = "a relay cannot count tokens, because /v1 has no request for that: ask the \
                       gateway in the node (gateway.listen)";
            return Err(refuse(StatusCode::NOT_FOUND, why, false).into());
        };
        self.complete(&mut head.headers)?;
        let chat = dialects::anthropic_chat(body);
        let chat = chat.map_err(|why| refuse(StatusCode::BAD_REQUEST, &why, false))?;
        let (body, _) = self.translate(&mut head, chat, line).await?;
        head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let Ok(answer) = counter.clone().oneshot(Request::from_parts(head, Body::from(body))).await;
        let (head, body) = answer.into_parts();
        let body = body.collect().await.map(Collected::to_bytes).unwrap_or_default();
        let count = serde_json::from_slice::<Value>(&body).unwrap_or_default();
        Ok(match count["prompt_tokens"].as_u64() {
            Some(tokens) => known(&json!({ "input_tokens": tokens })),
            None => whole(head, body),
        })
    }
}

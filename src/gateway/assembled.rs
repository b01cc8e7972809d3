//! The node's stream as one whole answer.

use super::answer::{GatewayBody, JSON, SHOULD_RETRY, passed_on};
use super::calls::Exchange;
use super::dialects::{self, AnswerWriter};
use super::log_line::GatewayLine;
use super::{GatewayRefusal, upstream};
use axum::body::Body;
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use serde_json::json;

/// The node's stream as one object, which `writer` makes.
pub(super) async fn assembled(
    response: Response<Body>,
    exchange: Option<Exchange>,
    writer: Box<dyn AnswerWriter>,
    model: String,
    line: &mut GatewayLine,
) -> Result<Response<GatewayBody>, GatewayRefusal> {
    let (mut head, stream) = upstream::collected(response).await?.into_parts();
    line.count_tokens(&stream);
    let (status, text) = match dialects::whole(writer, model, &stream) {
        Ok(answer) => (StatusCode::OK, answer),
        Err(error) => {
            head.headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
            (status_of(&error.code), json!({ "error": error }))
        }
    };
    head.status = status;
    // A stored answer of the node has a length, which is not this one's.
    head.headers.remove(CONTENT_LENGTH);
    head.headers.insert(CONTENT_TYPE, JSON);
    let body = Body::from(text.to_string());
    Ok(passed_on(Response::from_parts(head, body), exchange, None))
}

/// The status of an answer that failed after its stream had begun.
fn status_of(code: &str) -> StatusCode {
    match code {
        "deadline_exceeded" => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

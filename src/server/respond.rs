//! The outermost layer: every response gets its request id, its cache rules and, for errors, its body.

use super::error::ApiError;
use super::headers;
use super::node::Node;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;
use uuid::Uuid;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The id a response carries in `x-request-id`: the client's own where it sent a valid one.
#[derive(Clone, Copy, Debug)]
pub struct ResponseId(pub Uuid);

pub async fn dress(State(node): State<Arc<Node>>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = headers::idempotency_key(request.headers()).map_or_else(|_| Uuid::now_v7(), |key| key.0);
    request.extensions_mut().insert(ResponseId(id));
    let method = request.method().clone();
    let mut response = match check_header_count(&node, &request) {
        // A panic is a failure of ours: the client gets an answer, not a cut connection.
        Ok(()) => AssertUnwindSafe(next.run(request))
            .catch_unwind()
            .await
            .unwrap_or_else(|_| ApiError::GenerationFailed.into_response()),
        Err(error) => error.into_response(),
    };
    let code = write_error_body(&mut response, id);
    set_headers(&mut response, id);
    let status = response.status().as_u16();
    node.metrics.http_response(status, code.unwrap_or("ok"));
    let milliseconds = began.elapsed().as_millis() as u64;
    if method == Method::GET && code.is_none() {
        // Clients read often, and a line of the log costs as much as the read.
        tracing::debug!(%method, status, request_id = %id, milliseconds, "answered");
    } else {
        tracing::info!(%method, status, code, request_id = %id, milliseconds, "answered");
    }
    response
}

/// HTTP/2 bounds headers by bytes alone; HTTP/1 requests over the count never come this far.
fn check_header_count(node: &Node, request: &Request) -> Result<(), ApiError> {
    let limit = node.config.http.max_headers;
    if request.headers().len() <= limit {
        return Ok(());
    }
    Err(ApiError::InvalidRequest { message: format!("At most {limit} headers are taken."), param: None })
}

fn write_error_body(response: &mut Response, id: Uuid) -> Option<&'static str> {
    let error = response.extensions_mut().remove::<ApiError>()?;
    let text = error.body(&id.hyphenated().to_string()).to_string();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(header::CONTENT_LENGTH, text.len().into());
    *response.body_mut() = Body::from(text);
    Some(error.code())
}

fn set_headers(response: &mut Response, id: Uuid) {
    let text = HeaderValue::from_str(&id.hyphenated().to_string()).expect("invariant: a UUID is a header value");
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, text);
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("private, no-store"));
}

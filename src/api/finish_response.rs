//! The outermost layer: every response gets its request id, its cache rules and, for errors, its
//! body.

use super::access_log::{AccessLine, Hop};
use super::error::ApiError;
use super::forward::FORWARDED;
use super::headers::{self, KeyRead};
use crate::Api;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use cresset_request::Services;
use cresset_transport::{HeadError, HttpSettings, set_headers, set_json};
use futures_util::FutureExt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use uuid::Uuid;

/// Middleware around everything: answers panics, and finishes every response.
pub async fn finish_response(
    State(Api { services, settings }): State<Api>,
    mut request: Request,
    next: Next,
) -> Response {
    let key: KeyRead = headers::idempotency_key(request.headers());
    let id = key.as_ref().map_or_else(|_| Uuid::now_v7(), |key| key.0);
    request.extensions_mut().insert(key);
    let line = AccessLine::begin(&services.traces, &request, id);
    request.extensions_mut().insert(line.clone());
    let mut response = match check_head(&settings.http, &request) {
        // A panic is our failure: the client gets an answer, not a cut connection.
        Ok(()) => AssertUnwindSafe(next.run(request))
            .catch_unwind()
            .await
            .unwrap_or_else(|_| ApiError::GenerationFailed.into_response()),
        Err(error) => error.into_response(),
    };
    let code = write_error_body(&mut response, id);
    set_headers(&mut response, id);
    let status = response.status().as_u16();
    let label = if line.was_passed(Hop::Sent) { "forwarded" } else { code.unwrap_or("ok") };
    services.metrics.http_response(status, label);
    line.answered(status, code);
    response
}

/// Middleware of the listener of other nodes: what they have not passed on is refused.
pub async fn require_forwarded(
    State(services): State<Arc<Services>>,
    mut request: Request,
    next: Next,
) -> Response {
    if !request.headers().contains_key(FORWARDED) {
        return outside(ApiError::malformed(
            "Other nodes pass requests on to this address, and clients have another one: send the \
             request to listen.public.",
        ));
    }
    services.metrics.forwarded("received");
    request.extensions_mut().insert(Hop::Received);
    next.run(request).await
}

/// The response to a request that this middleware does not see.
fn outside(error: ApiError) -> Response {
    let (mut response, id) = (error.into_response(), Uuid::now_v7());
    let code = write_error_body(&mut response, id);
    set_headers(&mut response, id);
    tracing::debug!(status = response.status().as_u16(), code, request_id = %id, "refused");
    response
}

/// The bounds of a head for HTTP/2. HTTP/1 heads beyond them are refused before this.
fn check_head(limits: &HttpSettings, request: &Request) -> Result<(), ApiError> {
    if request.version() < Version::HTTP_2 {
        return Ok(());
    }
    let headers = request.headers();
    let line = |(name, value): (&HeaderName, &HeaderValue)| {
        name.as_str().len() + value.len() + ": \r\n".len()
    };
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    let bytes = target + headers.iter().map(line).sum::<usize>();
    let small = headers.len() <= limits.max_headers && bytes <= limits.max_header_bytes;
    if small { Ok(()) } else { Err(ApiError::Head(HeadError::too_large(limits))) }
}

fn write_error_body(response: &mut Response, id: Uuid) -> Option<&'static str> {
    let error = response.extensions_mut().remove::<ApiError>()?;
    set_json(response, &error.body(&id.hyphenated().to_string()));
    Some(error.code())
}

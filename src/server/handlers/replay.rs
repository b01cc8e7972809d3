//! What a request id that was seen before answers.

use crate::ledger::{AttemptState, RequestRecord};
use crate::request::services::Node;
use crate::server::error::ApiError;
use crate::server::sse;
use crate::server::wire::completion::Completion;
use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;

/// What to do about a record under the request's key.
#[derive(Debug, PartialEq)]
pub enum Known {
    /// The answer is there.
    Answered,
    /// The last attempt failed on the node's side: another may be made.
    MayRetry,
}

/// Whether the record is this very request, and where it stands. However it ended, past its
/// retention it is only known.
pub fn judge(
    node: &Node,
    record: &RequestRecord,
    fingerprint: &[u8; 32],
) -> Result<Known, ApiError> {
    if record.fingerprint != *fingerprint {
        return Err(ApiError::IdempotencyKeyReused);
    }
    let until =
        record.latest().finished_at.map(|at| at.0.saturating_add(node.config.requests.replay_ms()));
    if until.is_some_and(|until| until <= node.clock.now().0) {
        return Err(ApiError::RequestResultExpired);
    }
    match record.latest().state {
        AttemptState::Completed => Ok(Known::Answered),
        AttemptState::Failed if record.is_exhausted() => Err(ApiError::AttemptsExhausted),
        AttemptState::Failed => Ok(Known::MayRetry),
        AttemptState::Cancelled => Err(ApiError::RequestCancelled),
        AttemptState::Queued | AttemptState::Running => Err(ApiError::RequestInProgress),
    }
}

/// The stored answer: the same bytes, or the same chunks' content as a stream.
pub async fn answer(
    node: &Node,
    record: &RequestRecord,
    include_usage: bool,
) -> Result<Response, ApiError> {
    let body = node.store.body(&record.key).await?.ok_or(ApiError::RequestResultExpired)?;
    let mut response = if record.stream {
        let completion: Completion =
            serde_json::from_slice(&body).map_err(|_| ApiError::ControlPlaneUnavailable)?;
        sse::response(sse::whole(&completion.chunks(include_usage)))
    } else {
        json(body)
    };
    response.headers_mut().insert("idempotent-replayed", HeaderValue::from_static("true"));
    node.metrics.replays.inc();
    Ok(response)
}

/// A finished body as it is.
pub fn json(body: Bytes) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], Body::from(body))
        .into_response()
}

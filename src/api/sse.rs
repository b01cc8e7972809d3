//! Server-sent events: the exact bytes of a stream, and the response that carries them.
//!
//! Only `data:` lines and comments: `id:`, `event:` and `retry:` lines break several widespread
//! clients.

use super::access_log::AccessLine;
use super::error::ApiError;
use super::wire::completion::ChunkWriter;
use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use cresset_request::{AnswerFigures, Delta, Subscription};
use futures_util::stream;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");
const KEEP_ALIVE: Bytes = Bytes::from_static(b": keep-alive\n\n");

const BEGIN: &[u8] = b"data: ";
const END: &[u8] = b"\n\n";

/// Makes one event; `json` is one line. There is one for each token, so its bytes are allocated
/// once, to their exact length.
pub fn event(json: &str) -> Bytes {
    let mut bytes = Vec::with_capacity(BEGIN.len() + json.len() + END.len());
    for part in [BEGIN, json.as_bytes(), END] {
        bytes.extend_from_slice(part);
    }
    bytes.into()
}

/// A finished answer as one piece.
pub fn whole(chunks: &[String]) -> Body {
    let mut bytes: Vec<u8> = chunks.iter().flat_map(|chunk| event(chunk)).collect();
    bytes.extend_from_slice(&DONE);
    Body::from(bytes)
}

/// Reports a failure after the first byte: an event, then a clean end.
fn failure(error: &ApiError, id: Uuid) -> Bytes {
    let text = error.body(&id.hyphenated().to_string()).to_string();
    [event(&text), DONE].concat().into()
}

/// Follows a live request from its first delta to its end, with a comment whenever nothing happened
/// for `silence`. Every event is a frame of its own, so that each leaves at once.
pub fn follow(
    deltas: Subscription,
    chunks: ChunkWriter,
    silence: Duration,
    line: Arc<AccessLine>,
) -> Body {
    let first = VecDeque::from([event(&chunks.first())]);
    let events = stream::unfold(Some((deltas, first)), move |state| {
        let (chunks, line) = (chunks.clone(), line.clone());
        async move {
            let (mut deltas, mut ready) = state?;
            let frame = loop {
                if let Some(frame) = ready.pop_front() {
                    break frame;
                }
                match tokio::time::timeout(silence, deltas.next()).await {
                    Err(_) => break KEEP_ALIVE,
                    Ok(Ok(Some(delta))) => {
                        note(&delta, &line);
                        ready.extend(chunks.delta(&delta).iter().map(|chunk| event(chunk)));
                    }
                    Ok(Ok(None)) => return Some((Ok(DONE), None)),
                    Ok(Err(error)) => {
                        let error = error.into();
                        line.failed(ApiError::code(&error));
                        return Some((Ok(failure(&error, chunks.id.0)), None));
                    }
                }
            };
            Some((Ok::<_, Infallible>(frame), Some((deltas, ready))))
        }
    });
    Body::from_stream(events)
}

fn note(delta: &Delta, line: &AccessLine) {
    match *delta {
        Delta::Part(_) => line.token(),
        Delta::Finished { usage, charged, .. } => {
            line.completed(Some(AnswerFigures { usage, charged, first_token: None }));
        }
    }
}

/// The headers that keep proxies from holding a stream back.
pub fn response(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("private, no-store, no-transform")),
        (header::HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, body).into_response()
}

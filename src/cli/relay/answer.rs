//! Answers on their way to the client: the node's, watched until they have been sent, and the
//! relay's own refusals.

use super::calls::Exchange;
use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::HeaderValue;
use hyper::{Response, StatusCode};
use serde_json::json;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

const SHOULD_RETRY: &str = "x-should-retry";
/// The last event of a stream. Clients close the connection when they have seen it, without waiting
/// for the end of the body.
const DONE: &[u8] = b"data: [DONE]\n\n";

pub(super) type RelayBody = Either<WatchedAnswer, Full<Bytes>>;

/// The node's answer, as part of a call if the relay gave it its key.
pub(super) fn passed_on(
    response: Response<Incoming>,
    exchange: Option<Exchange>,
) -> Response<RelayBody> {
    // The node says so on errors after which the call is still open, such as one that finds the
    // node full.
    let open = response.headers().get(SHOULD_RETRY).is_some_and(|retry| retry == "true");
    response.map(|body| {
        let mut watched = WatchedAnswer { body, exchange, open, tail: Vec::new() };
        watched.note_end();
        Either::Left(watched)
    })
}

/// A body that tells its call when all of it has been sent.
pub(super) struct WatchedAnswer {
    body: Incoming,
    exchange: Option<Exchange>,
    /// The answer does not end the call.
    open: bool,
    /// The last bytes sent, as many as `DONE` has at most.
    tail: Vec<u8>,
}

impl WatchedAnswer {
    fn note(&mut self, data: &[u8]) {
        self.tail.extend_from_slice(&data[data.len().saturating_sub(DONE.len())..]);
        self.tail.drain(..self.tail.len().saturating_sub(DONE.len()));
        self.note_end();
    }

    fn note_end(&mut self) {
        if self.body.is_end_stream() || self.tail == DONE {
            self.ended();
        }
    }

    fn ended(&mut self) {
        if let Some(exchange) = &mut self.exchange {
            exchange.answered = !self.open;
        }
    }
}

impl Body for WatchedAnswer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        match &frame {
            None => self.ended(),
            Some(Ok(frame)) => self.note(frame.data_ref().map_or(&[], |data| data)),
            Some(Err(_)) => {}
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The relay's own error answer, in the form of the node's errors.
pub(super) fn refuse(status: StatusCode, message: &str, should_retry: bool) -> Response<RelayBody> {
    let body = json!({ "error": { "code": "relay", "message": message, "type": "server_error" } });
    let mut response = Response::new(Either::Right(Full::new(body.to_string().into())));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert("content-type", HeaderValue::from_static("application/json"));
    let should_retry = if should_retry { "true" } else { "false" };
    headers.insert(SHOULD_RETRY, HeaderValue::from_static(should_retry));
    response
}

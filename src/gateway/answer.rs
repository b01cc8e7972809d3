//! Answers on their way to the client: the node's, watched until they have been sent, and the
//! gateway's own refusals.

use super::calls::Exchange;
use super::dialects::{self, ApiDialect, TranslatedStream};
use super::log_line::GatewayLine;
use axum::body::Body as NodeBody;
use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use hyper::http::response::Parts;
use hyper::{Response, StatusCode};
use serde_json::{Value, json};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use uuid::Uuid;

pub(super) const SHOULD_RETRY: &str = "x-should-retry";
/// The header in which a node tells its own gateway how long a prompt is.
const PROMPT_TOKENS: &str = "x-prompt-tokens";
/// Bytes of an answer's end that are kept. Its usage and its last event are among them.
const TAIL: usize = 1_024;
/// The last event of a stream. Clients close the connection when they have seen it, without waiting
/// for the end of the body.
const DONE: &[u8] = b"data: [DONE]\n\n";

const EVENT: &[u8] = b"data: ";
/// Events after which a client that closes a stream has stopped it. The first one has no text: who
/// leaves there may have given up waiting, and ask again.
const SHOWN: usize = 2;

pub(super) type GatewayBody = Either<Box<WatchedAnswer>, Full<Bytes>>;

pub(super) const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// The node's answer, as part of a call if the gateway gave it its key.
pub(super) fn passed_on(
    response: Response<NodeBody>,
    exchange: Option<Exchange>,
    rewriting: Option<Rewriting>,
) -> Response<GatewayBody> {
    // The node says so on errors after which the call is still open, such as one that finds the
    // node full.
    let open = response.headers().get(SHOULD_RETRY).is_some_and(|retry| retry == "true");
    let mut response = response.map(|body| {
        let ended = false;
        let tail = Vec::new();
        let line = None;
        let events = 0;
        let mut watched =
            WatchedAnswer { body, exchange, open, events, tail, rewriting, ended, line };
        watched.note_end();
        Either::Left(Box::new(watched))
    });
    if matches!(response.body(), Either::Left(watched) if watched.rewriting.is_some()) {
        response.headers_mut().remove(CONTENT_LENGTH);
    }
    response
}

/// The node's stream as a stream of the dialect of `stream`.
pub(super) fn translated(
    mut response: Response<NodeBody>,
    exchange: Option<Exchange>,
    stream: TranslatedStream,
) -> Response<GatewayBody> {
    let told = response.headers_mut().remove(PROMPT_TOKENS);
    let tokens = told.and_then(|told| told.to_str().ok()?.parse().ok()).unwrap_or_default();
    let stream = stream.with_prompt(tokens);
    let content_type = HeaderValue::from_static(stream.content_type());
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    passed_on(response, exchange, Some(Rewriting::Dialect(Box::new(stream))))
}

/// The answer in the dialect's own form if it is an error.
pub(super) async fn in_dialect(
    dialect: ApiDialect,
    answer: Response<GatewayBody>,
) -> Response<GatewayBody> {
    if answer.status().is_success() {
        return answer;
    }
    let (mut head, body) = answer.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let error = dialects::UpstreamError::of_answer(&head, &body);
    let (status, text) = dialect.refusal(head.status, &error);
    head.status = status;
    head.headers.remove(CONTENT_LENGTH);
    head.headers.insert(CONTENT_TYPE, JSON);
    whole(head, text.to_string().into())
}

/// A line of text that the gateway answers by itself.
pub(super) fn plain(text: &'static str) -> Response<GatewayBody> {
    Response::new(Either::Right(Full::new(Bytes::from_static(text.as_bytes()))))
}

/// An answer that the gateway gives by itself.
pub(super) fn known(answer: &Value) -> Response<GatewayBody> {
    let mut response = Response::new(Either::Right(Full::new(answer.to_string().into())));
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}

/// Lets `line` be written when the answer has been sent.
pub(super) fn logged(
    mut answer: Response<GatewayBody>,
    mut line: GatewayLine,
) -> Response<GatewayBody> {
    line.left_out.tell(answer.headers_mut());
    line.answered(&answer);
    if let Either::Left(watched) = answer.body_mut() {
        watched.line = Some(line);
    }
    answer
}

/// An answer that is known whole.
pub(super) fn whole(head: Parts, body: Bytes) -> Response<GatewayBody> {
    Response::from_parts(head, Either::Right(Full::new(body)))
}

/// How the node's bytes change on their way.
#[derive(Debug)]
pub(super) enum Rewriting {
    Name(Renaming),
    Dialect(Box<TranslatedStream>),
}

impl Rewriting {
    /// What becomes of `data`, and of all that was held back if it is the `last`.
    fn take(&mut self, data: &[u8], last: bool) -> Bytes {
        match self {
            Self::Name(renaming) => renaming.take(data, last),
            Self::Dialect(stream) => stream.take(data),
        }
    }
}

/// Puts the name that the client used in place of the model's id.
#[derive(Debug)]
pub(super) struct Renaming {
    id: String,
    name: String,
    /// Bytes of a line whose end has not come.
    line: Vec<u8>,
}

impl Renaming {
    pub(super) fn new(id: &str, name: &str) -> Self {
        // Inside a JSON string no quotation mark stands without a backslash before it, so these
        // bytes are a member wherever they are found, and never part of an answer's text.
        let member = |value: &str| format!("\"model\":{}", json!(value));
        Self { id: member(id), name: member(name), line: Vec::new() }
    }

    /// The lines that `data` ends, renamed; all that is left if it is the `last`.
    fn take(&mut self, data: &[u8], last: bool) -> Bytes {
        let ends = data.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let (ended, begun) = data.split_at(if last { data.len() } else { ends });
        if ended.is_empty() && !last {
            self.line.extend_from_slice(begun);
            return Bytes::new();
        }
        let mut lines = std::mem::replace(&mut self.line, begun.to_vec());
        lines.extend_from_slice(ended);
        match String::from_utf8(lines) {
            Ok(text) => text.replace(&self.id, &self.name).into(),
            Err(error) => error.into_bytes().into(),
        }
    }
}

/// A body that tells its call when all of it has been sent.
#[derive(Debug)]
pub(super) struct WatchedAnswer {
    body: NodeBody,
    exchange: Option<Exchange>,
    /// The answer does not end the call.
    open: bool,
    /// Events of the node's stream so far, up to those that show that the client has read some.
    events: usize,
    /// The last bytes of the node's body.
    tail: Vec<u8>,
    rewriting: Option<Rewriting>,
    /// The node's body has ended, and all of it has been given on.
    ended: bool,
    line: Option<GatewayLine>,
}

impl Drop for WatchedAnswer {
    fn drop(&mut self) {
        if let Some(line) = &mut self.line {
            line.count_tokens(&self.tail);
        }
        if let Some(exchange) = &mut self.exchange
            && self.events >= SHOWN
        {
            exchange.stop();
        }
    }
}

impl WatchedAnswer {
    fn note(&mut self, data: &[u8]) {
        if self.events < SHOWN {
            self.events += data.windows(EVENT.len()).filter(|bytes| *bytes == EVENT).count();
        }
        self.tail.extend_from_slice(&data[data.len().saturating_sub(TAIL)..]);
        self.tail.drain(..self.tail.len().saturating_sub(TAIL));
        self.note_end();
    }

    fn note_end(&mut self) {
        if self.body.is_end_stream() || self.tail.ends_with(DONE) {
            self.ended();
        }
    }

    fn keep(&mut self) {
        if let Some(exchange) = &mut self.exchange {
            exchange.stop = None;
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
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        loop {
            if self.ended {
                return Poll::Ready(None);
            }
            let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
            match &frame {
                None => self.ended(),
                Some(Ok(frame)) => self.note(frame.data_ref().map_or(&[], |data| data)),
                // The node broke it off: its client may come back for the rest.
                Some(Err(_)) => self.keep(),
            }
            let Some(rewriting) = &mut self.rewriting else {
                return Poll::Ready(frame);
            };
            let rewritten = match &frame {
                Some(Err(_)) => return Poll::Ready(frame),
                Some(Ok(frame)) => rewriting.take(frame.data_ref().map_or(&[], |data| data), false),
                None => rewriting.take(&[], true),
            };
            self.ended = frame.is_none();
            if !rewritten.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(rewritten))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended || (self.rewriting.is_none() && self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        match &self.rewriting {
            Some(_) => SizeHint::default(),
            None => self.body.size_hint(),
        }
    }
}

/// The gateway's own error answer, in the form of the node's errors.
pub(super) fn refuse(
    status: StatusCode,
    message: &str,
    should_retry: bool,
) -> Response<GatewayBody> {
    refuse_as("gateway", status, message, should_retry)
}

pub(super) fn refuse_as(
    code: &str,
    status: StatusCode,
    message: &str,
    should_retry: bool,
) -> Response<GatewayBody> {
    let kind = if status.is_client_error() { "invalid_request_error" } else { "server_error" };
    let id = Uuid::new_v4();
    let error = json!({ "code": code, "message": message, "type": kind, "request_id": id });
    let body = json!({ "error": error });
    let mut response = Response::new(Either::Right(Full::new(body.to_string().into())));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(super::REQUEST_ID, super::header(id));
    headers.insert(CONTENT_TYPE, JSON);
    let should_retry = if should_retry { "true" } else { "false" };
    headers.insert(SHOULD_RETRY, HeaderValue::from_static(should_retry));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_takes_the_ids_place_however_the_bytes_arrive() {
        let text = "data: {\"model\":\"id-1\",\"content\":\"\\\"model\\\":\\\"id-1\\\"\"}\n\nend";
        let expect = text.replacen("id-1", "small \\\"1\\\"", 1);
        for size in 1..=text.len() {
            let mut renaming = Renaming::new("id-1", "small \"1\"");
            let pieces = text.as_bytes().chunks(size).map(|piece| renaming.take(piece, false));
            let mut all: Vec<u8> = pieces.collect::<Vec<_>>().concat();
            all.extend_from_slice(&renaming.take(&[], true));
            assert_eq!(String::from_utf8(all).unwrap(), expect, "{size}");
        }
    }
}

//! A small HTTP/1 client for the node itself: its public address, or the operator socket in the
//! data folder.

use super::output::{CommandError, CommandResult};
use bytes::{Bytes, BytesMut};
use cresset_tls::NodeAddress;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::path::Path;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

/// Largest answer that is read into memory, bytes. Statements and lists of a large ledger fit.
const MAX_ANSWER: usize = 256 << 20;

/// One request on a connection of its own.
#[derive(Debug)]
pub(crate) struct HttpCall {
    pub method: Method,
    pub path: String,
    pub headers: Vec<(&'static str, String)>,
    pub body: Bytes,
}

impl HttpCall {
    pub(crate) fn get(path: &str) -> Self {
        Self { method: Method::GET, path: path.to_owned(), headers: Vec::new(), body: Bytes::new() }
    }

    pub(crate) fn post(path: &str, body: &Value) -> Self {
        let headers = vec![("content-type", "application/json".to_owned())];
        Self { method: Method::POST, path: path.to_owned(), headers, body: body.to_string().into() }
    }

    pub(crate) fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    pub(crate) fn bearer(self, secret: &str) -> Self {
        self.header("authorization", format!("Bearer {secret}"))
    }

    pub(crate) async fn send(self, node: &NodeAddress) -> CommandResult<Response<Incoming>> {
        let stream = node.connect().await.map_err(|error| {
            CommandError::new(format!("cannot connect to {}: {error}", node.url))
                .remedy("start a node with `cresset serve`")
        })?;
        self.exchange(stream, &node.authority).await
    }

    /// Sends to a node's operator socket. `None` when no node listens on it.
    pub(crate) async fn send_to_socket(
        self,
        socket: &Path,
    ) -> CommandResult<Option<Response<Incoming>>> {
        match UnixStream::connect(socket).await {
            Ok(stream) => self.exchange(stream, "operator").await.map(Some),
            Err(_) => Ok(None),
        }
    }

    async fn exchange<S>(self, stream: S, host: &str) -> CommandResult<Response<Incoming>>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        tokio::spawn(connection);
        let mut request =
            Request::builder().method(self.method).uri(self.path).header("host", host);
        for (name, value) in self.headers {
            request = request.header(name, value);
        }
        let request = request.body(Full::new(self.body)).map_err(CommandError::new)?;
        sender.send_request(request).await.map_err(broken)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "used as map_err(broken)")]
fn broken(error: hyper::Error) -> CommandError {
    CommandError::new(format!("the connection to the node broke: {error}"))
        .remedy("see whether it runs: `cresset status`")
}

/// The whole answer as JSON.
pub(crate) async fn json(response: Response<Incoming>) -> CommandResult<(StatusCode, Value)> {
    let status = response.status();
    let body = http_body_util::Limited::new(response.into_body(), MAX_ANSWER);
    let bytes = body.collect().await.map_err(CommandError::new)?.to_bytes();
    let value = serde_json::from_slice(&bytes).map_err(|error| {
        CommandError::new(format!(
            "the node answered {status} with something that is no JSON: {error}"
        ))
    })?;
    Ok((status, value))
}

/// The answer of the public surface, or its error as a failure.
pub(crate) async fn accepted(response: Response<Incoming>) -> CommandResult<Value> {
    let (status, value) = json(response).await?;
    if status.is_success() { Ok(value) } else { Err(refusal(status, &value)) }
}

/// The error that a body of the public surface describes.
pub(crate) fn refusal(status: StatusCode, body: &Value) -> CommandError {
    let error = &body["error"];
    let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
    CommandError::new(format!(
        "the node answered {}: {} {}",
        status.as_u16(),
        text("code"),
        text("message")
    ))
}

/// The `data:` payloads of a server-sent event stream.
pub(crate) struct EventStream {
    body: Incoming,
    buffer: BytesMut,
}

impl EventStream {
    pub(crate) fn new(response: Response<Incoming>) -> Self {
        Self { body: response.into_body(), buffer: BytesMut::new() }
    }

    /// The next payload; `None` at the end of the stream. Comments are skipped.
    pub(crate) async fn next(&mut self) -> CommandResult<Option<String>> {
        loop {
            if let Some(line) = take_line(&mut self.buffer) {
                match line.strip_prefix("data:") {
                    Some(data) => return Ok(Some(data.trim_start().to_owned())),
                    None => continue,
                }
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(frame) => {
                    let frame = frame.map_err(broken)?;
                    self.buffer.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
                }
            }
        }
    }
}

fn take_line(buffer: &mut BytesMut) -> Option<String> {
    let end = buffer.iter().position(|byte| *byte == b'\n')?;
    let line = buffer.split_to(end + 1);
    Some(String::from_utf8_lossy(&line[..end]).trim_end_matches('\r').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_arrive_in_pieces() {
        let mut buffer = BytesMut::from(&b"data: a\r\n\nda"[..]);
        assert_eq!(take_line(&mut buffer).as_deref(), Some("data: a"));
        assert_eq!(take_line(&mut buffer).as_deref(), Some(""));
        assert_eq!(take_line(&mut buffer), None);
        buffer.extend_from_slice(b"ta: b\n");
        assert_eq!(take_line(&mut buffer).as_deref(), Some("data: b"));
    }
}

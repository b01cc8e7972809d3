//! A small HTTP/1 client for a node: its public address, or the operator socket in the data folder.

use crate::ClientError;
use bytes::Bytes;
use cresset_tls::NodeAddress;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::path::Path;
use std::pin::pin;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

/// Largest answer that is read into memory, bytes. Statements and lists of a large ledger fit.
const MAX_ANSWER: usize = 256 << 20;

/// One request on a connection of its own.
#[derive(Debug)]
pub struct HttpCall {
    pub method: Method,
    pub path: String,
    pub headers: Vec<(&'static str, String)>,
    pub body: Bytes,
}

impl HttpCall {
    pub fn get(path: &str) -> Self {
        Self { method: Method::GET, path: path.to_owned(), headers: Vec::new(), body: Bytes::new() }
    }

    pub fn post(path: &str, body: &Value) -> Self {
        let headers = vec![("content-type", "application/json".to_owned())];
        Self { method: Method::POST, path: path.to_owned(), headers, body: body.to_string().into() }
    }

    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    pub fn bearer(self, secret: &str) -> Self {
        self.header("authorization", format!("Bearer {secret}"))
    }

    pub async fn send(self, node: &NodeAddress) -> Result<Response<Incoming>, ClientError> {
        let stream = node.connect().await.map_err(|error| {
            ClientError::new(format!("cannot connect to {}: {error}", node.url))
                .remedy("start a node with `cresset serve`")
        })?;
        self.exchange(stream, &node.authority).await
    }

    /// Sends to a node's operator socket. `None` when no node listens on it.
    pub async fn send_to_socket(
        self,
        socket: &Path,
    ) -> Result<Option<Response<Incoming>>, ClientError> {
        match UnixStream::connect(socket).await {
            Ok(stream) => self.exchange(stream, "operator").await.map(Some),
            Err(_) => Ok(None),
        }
    }

    async fn exchange<S>(self, stream: S, host: &str) -> Result<Response<Incoming>, ClientError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        tokio::spawn(connection);
        sender.send_request(self.request(host)?).await.map_err(broken)
    }

    /// The request itself, for a node at `host`.
    pub fn request(self, host: &str) -> Result<Request<Full<Bytes>>, ClientError> {
        let mut request =
            Request::builder().method(self.method).uri(self.path).header("host", host);
        for (name, value) in self.headers {
            request = request.header(name, value);
        }
        request.body(Full::new(self.body)).map_err(ClientError::new)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "used as map_err(broken)")]
fn broken(error: hyper::Error) -> ClientError {
    ClientError::new(format!("the connection to the node broke: {error}"))
        .remedy("see whether it runs: `cresset status`")
}

/// The whole answer as JSON.
pub async fn json<B>(response: Response<B>) -> Result<(StatusCode, Value), ClientError>
where
    B: Body<Data = Bytes>,
    B::Error: std::fmt::Display,
{
    let status = response.status();
    let mut body = pin!(response.into_body());
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        bytes.extend_from_slice(frame.map_err(ClientError::new)?.data_ref().map_or(&[][..], |d| d));
        if bytes.len() > MAX_ANSWER {
            return Err(ClientError::new("the answer is too long"));
        }
    }
    let value = serde_json::from_slice(&bytes).map_err(|error| {
        ClientError::new(format!(
            "the node answered {status} with something that is no JSON: {error}"
        ))
    })?;
    Ok((status, value))
}

/// The answer of the public surface, or its error as a failure.
pub async fn accepted<B>(response: Response<B>) -> Result<Value, ClientError>
where
    B: Body<Data = Bytes>,
    B::Error: std::fmt::Display,
{
    let (status, value) = json(response).await?;
    if status.is_success() { Ok(value) } else { Err(refusal(status, &value)) }
}

/// The error that a body of the public surface describes.
pub fn refusal(status: StatusCode, body: &Value) -> ClientError {
    let error = &body["error"];
    let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
    ClientError::new(format!(
        "the node answered {}: {} {}",
        status.as_u16(),
        text("code"),
        text("message")
    ))
}

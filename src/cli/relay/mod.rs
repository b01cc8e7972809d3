//! `cresset relay`: a loopback proxy for tools that cannot set headers per request. It adds a
//! session, and an `Idempotency-Key` per call that it keeps over its own retries and the client's,
//! and streams answers through untouched.

mod answer;
mod calls;
#[cfg(test)]
mod tests;

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult};
use super::support::{shutdown, values};
use crate::server::own_names::OwnNames;
use answer::{RelayBody, passed_on, refuse};
use bytes::Bytes;
use calls::{Calls, Exchange};
use clap::Args;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{
    AUTHORIZATION, CONNECTION, HOST, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING,
};
use hyper::http::request::Parts;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Times that one request is sent when its connection breaks before an answer begins. Sending it
/// again is safe because it carries the same idempotency key.
const SENDS: u32 = 3;
/// Largest body taken from a client, bytes. The node's own limit is lower by default.
const MAX_BODY: usize = 64 << 20;
/// Time in which the end of a broken connection is noticed, although the client's next one came
/// first. Only a request that equals one under way waits for it.
const NOTICE: Duration = Duration::from_millis(20);
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const SESSION: HeaderName = HeaderName::from_static("x-service-session-id");
/// The header in which tools send a request id of their own.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The header in which OpenAI's clients count the retries of a call.
const RETRY_COUNT: &str = "x-stainless-retry-count";
/// Headers in which chat programs send the id of their conversation. The first one that holds a
/// UUID is used.
const FOREIGN_SESSIONS: [&str; 4] =
    ["x-openwebui-chat-id", "x-session-id", "x-correlation-id", "x-session-affinity"];

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cresset relay --upstream http://127.0.0.1:8080 --key-file quickstart.key
Then give the tool http://127.0.0.1:11435/v1 as its base address.")]
pub(super) struct Arguments {
    /// Address to listen on; a port alone means this machine alone
    #[arg(
        long,
        value_name = "ADDR",
        default_value = "127.0.0.1:11435",
        value_parser = values::listen_address
    )]
    listen: SocketAddr,
    /// The node, as http://host:port
    #[arg(long, value_name = "URL")]
    upstream: Uri,
    /// File with the key to send in place of the client's
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Session for requests that name none [default: a fresh one for this run]
    #[arg(long, value_name = "UUID")]
    session: Option<Uuid>,
    /// Accept connections from other machines
    #[arg(long)]
    allow_remote: bool,
    /// Name besides localhost under which clients address the relay, such as host.docker.internal;
    /// may be repeated
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,
}

pub(super) async fn run(context: &Context, arguments: Arguments) -> CommandResult {
    if !arguments.listen.ip().is_loopback() && !arguments.allow_remote {
        let what = format!(
            "{} can be reached from other machines, who could spend the key's credits",
            arguments.listen
        );
        return Err(CommandError::new(what).remedy("listen on 127.0.0.1, or add --allow-remote"));
    }
    let listener = TcpListener::bind(arguments.listen).await.map_err(|error| {
        CommandError::new(format!("cannot listen on {}: {error}", arguments.listen))
    })?;
    let relay = Arc::new(Relay::new(&arguments, listener.local_addr()?)?);
    let address = format!("http://{}", listener.local_addr()?);
    let ready = json!({ "event": "ready", "listen": address, "session": relay.session });
    context.output.line(&ready, format!("relaying {address} to {}", arguments.upstream))?;
    serve(listener, relay, shutdown::on_signal()?).await
}

async fn serve(
    listener: TcpListener,
    relay: Arc<Relay>,
    shutdown: CancellationToken,
) -> CommandResult {
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                tokio::spawn(connection(relay.clone(), accepted?.0));
            }
            () = shutdown.cancelled() => return Ok(()),
        }
    }
}

/// The `Authorization` header made of the key in `file`.
fn credential(file: &Path) -> CommandResult<HeaderValue> {
    let key = std::fs::read_to_string(file).map_err(|error| {
        CommandError::new(format!("{}: {error}", file.display())).remedy("check --key-file")
    })?;
    let mut value =
        HeaderValue::from_str(&format!("Bearer {}", key.trim())).map_err(CommandError::new)?;
    value.set_sensitive(true);
    Ok(value)
}

async fn connection(relay: Arc<Relay>, stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let relay = relay.clone();
        async move { Ok::<_, Infallible>(relay.pass(request).await) }
    });
    if let Err(error) = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await
    {
        tracing::debug!(%error, "a client's connection ended badly");
    }
}

struct Relay {
    client: Client<HttpConnector, Full<Bytes>>,
    upstream: Uri,
    /// `Bearer …`, sent in place of the client's; `None` passes the client's on.
    credential: Option<HeaderValue>,
    session: Uuid,
    names: OwnNames,
    calls: Arc<Calls>,
}

impl Relay {
    fn new(arguments: &Arguments, listen: SocketAddr) -> CommandResult<Self> {
        if arguments.upstream.scheme_str() != Some("http")
            || arguments.upstream.authority().is_none()
        {
            return Err(CommandError::new(format!(
                "--upstream {}: an http://host:port address is needed",
                arguments.upstream
            )));
        }
        let credential = arguments.key_file.as_deref().map(credential);
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Ok(Self {
            client: Client::builder(TokioExecutor::new()).build(connector),
            upstream: arguments.upstream.clone(),
            credential: credential.transpose()?,
            session: arguments.session.unwrap_or_else(Uuid::new_v4),
            names: OwnNames::new(listen, &arguments.host),
            calls: Arc::default(),
        })
    }

    async fn pass(&self, request: Request<Incoming>) -> Response<RelayBody> {
        let (mut head, body) = request.into_parts();
        if let Some(why) = self.names.refusal(&head.uri, &head.headers) {
            return refuse(StatusCode::FORBIDDEN, why, false);
        }
        let Ok(body) = Limited::new(body, MAX_BODY).collect().await else {
            let why = "the request's body broke off or is too large";
            return refuse(StatusCode::PAYLOAD_TOO_LARGE, why, false);
        };
        let body = body.to_bytes();
        self.complete(&mut head.headers);
        let Ok(uri) = self.target(&head.uri) else {
            let why = "the request's path cannot be passed on";
            return refuse(StatusCode::BAD_REQUEST, why, false);
        };
        let exchange = self.exchange(&head, &body).await;
        if let Some(exchange) = &exchange {
            head.headers.insert(IDEMPOTENCY_KEY, header(exchange.key));
        }
        self.send(&head, &uri, &body, exchange).await
    }

    async fn send(
        &self,
        head: &Parts,
        uri: &Uri,
        body: &Bytes,
        exchange: Option<Exchange>,
    ) -> Response<RelayBody> {
        let mut may_have_arrived = false;
        for send in 1..=SENDS {
            let mut request = Request::new(Full::new(body.clone()));
            (*request.method_mut(), *request.uri_mut(), *request.headers_mut()) =
                (head.method.clone(), uri.clone(), head.headers.clone());
            match self.client.request(request).await {
                Ok(response) => return passed_on(response, exchange),
                Err(error) => {
                    may_have_arrived |= !error.is_connect();
                    tracing::warn!(%error, send, "the node did not answer");
                }
            }
        }
        let why = "the node cannot be reached: see whether it runs";
        refuse(StatusCode::BAD_GATEWAY, why, !may_have_arrived)
    }

    /// The call that a completion request belongs to. `None` for what costs nothing, and for
    /// requests whose client names the key itself.
    async fn exchange(&self, head: &Parts, body: &Bytes) -> Option<Exchange> {
        if head.method != Method::POST || head.headers.contains_key(IDEMPOTENCY_KEY) {
            return None;
        }
        let input = input_digest(head, body);
        let is_retry = retry_count(&head.headers) > 0;
        if !is_retry && self.calls.is_under_way(&input) {
            tokio::time::sleep(NOTICE).await;
        }
        let fresh = uuid_in(&head.headers, REQUEST_ID.as_str()).unwrap_or_else(Uuid::new_v4);
        #[expect(clippy::disallowed_methods, reason = "calls are forgotten by age")]
        let now = Instant::now();
        Some(self.calls.join(input, is_retry, fresh, now))
    }

    fn target(&self, asked: &Uri) -> Result<Uri, hyper::http::Error> {
        let path = asked.path_and_query().map_or("/", |path| path.as_str());
        let authority = self.upstream.authority().map_or("", |authority| authority.as_str());
        Uri::builder().scheme("http").authority(authority).path_and_query(path).build()
    }

    /// Adds the session and the credential, and removes what belongs to the client's connection.
    fn complete(&self, headers: &mut HeaderMap) {
        for hop in [CONNECTION, HOST, TRANSFER_ENCODING] {
            headers.remove(hop);
        }
        if !headers.contains_key(SESSION) {
            let foreign = FOREIGN_SESSIONS.iter().find_map(|name| uuid_in(headers, name));
            headers.insert(SESSION, header(foreign.unwrap_or(self.session)));
        }
        if let Some(credential) = &self.credential {
            headers.insert(AUTHORIZATION, credential.clone());
        }
    }
}

/// Requests are equal if path, session, credential and body are.
fn input_digest(head: &Parts, body: &Bytes) -> calls::InputDigest {
    let path = head.uri.path_and_query().map_or("", |path| path.as_str());
    let header = |name| head.headers.get(name).map_or(&[][..], HeaderValue::as_bytes);
    let mut digest = Sha256::new();
    for part in [path.as_bytes(), header(SESSION), header(AUTHORIZATION), body] {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    digest.finalize().into()
}

fn retry_count(headers: &HeaderMap) -> u32 {
    let count = headers.get(RETRY_COUNT).and_then(|count| count.to_str().ok());
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

fn uuid_in(headers: &HeaderMap, name: &str) -> Option<Uuid> {
    headers.get(name)?.to_str().ok()?.parse().ok().filter(|id: &Uuid| !id.is_nil())
}

fn header(id: Uuid) -> HeaderValue {
    HeaderValue::from_str(&id.hyphenated().to_string()).expect("invariant: a UUID is ASCII")
}

//! `cresset relay`: a loopback proxy for tools that cannot set headers per request. It adds a fresh
//! `Idempotency-Key` to each request and a session, keeps both over its own retries, and streams
//! answers through untouched.

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult};
use super::support::{shutdown, values};
use bytes::Bytes;
use clap::Args;
use http_body_util::{BodyExt, Either, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{
    AUTHORIZATION, CONNECTION, HOST, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING,
};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use uuid::Uuid;

/// Times that one request is sent when its connection breaks before an answer begins. Sending it
/// again is safe because it carries the same idempotency key.
const SENDS: u32 = 3;
/// Largest body taken from a client, bytes. The node's own limit is lower by default.
const MAX_BODY: usize = 64 << 20;
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const SESSION: HeaderName = HeaderName::from_static("x-service-session-id");
/// The header in which tools send a request id of their own.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Headers in which chat programs send the id of their conversation. The first one that holds a
/// UUID is used.
const FOREIGN_SESSIONS: [&str; 4] =
    ["x-openwebui-chat-id", "x-session-id", "x-correlation-id", "x-session-affinity"];

type RelayBody = Either<Incoming, Full<Bytes>>;

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
}

pub(super) async fn run(context: &Context, arguments: Arguments) -> CommandResult {
    if !arguments.listen.ip().is_loopback() && !arguments.allow_remote {
        let what = format!(
            "{} can be reached from other machines, who could spend the key's credits",
            arguments.listen
        );
        return Err(CommandError::new(what).remedy("listen on 127.0.0.1, or add --allow-remote"));
    }
    let relay = Arc::new(Relay::new(&arguments)?);
    let listener = TcpListener::bind(arguments.listen).await.map_err(|error| {
        CommandError::new(format!("cannot listen on {}: {error}", arguments.listen))
    })?;
    let address = format!("http://{}", listener.local_addr()?);
    let ready = json!({ "event": "ready", "listen": address, "session": relay.session });
    context.output.line(&ready, format!("relaying {address} to {}", arguments.upstream))?;
    let shutdown = shutdown::on_signal()?;
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
}

impl Relay {
    fn new(arguments: &Arguments) -> CommandResult<Self> {
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
        })
    }

    async fn pass(&self, request: Request<Incoming>) -> Response<RelayBody> {
        let (mut head, body) = request.into_parts();
        let Ok(body) = Limited::new(body, MAX_BODY).collect().await else {
            return refuse(
                StatusCode::PAYLOAD_TOO_LARGE,
                "the request's body broke off or is too large",
            );
        };
        let body = body.to_bytes();
        self.complete(&mut head.headers);
        let Ok(uri) = self.target(&head.uri) else {
            return refuse(StatusCode::BAD_REQUEST, "the request's path cannot be passed on");
        };
        for send in 1..=SENDS {
            let mut request = Request::new(Full::new(body.clone()));
            (*request.method_mut(), *request.uri_mut(), *request.headers_mut()) =
                (head.method.clone(), uri.clone(), head.headers.clone());
            match self.client.request(request).await {
                Ok(response) => return response.map(Either::Left),
                Err(error) => tracing::warn!(%error, send, "the node did not answer"),
            }
        }
        refuse(StatusCode::BAD_GATEWAY, "the node cannot be reached: see whether it runs")
    }

    fn target(&self, asked: &Uri) -> Result<Uri, hyper::http::Error> {
        let path = asked.path_and_query().map_or("/", |path| path.as_str());
        let authority = self.upstream.authority().map_or("", |authority| authority.as_str());
        Uri::builder().scheme("http").authority(authority).path_and_query(path).build()
    }

    /// Adds the headers that the node requires and the client did not send.
    fn complete(&self, headers: &mut HeaderMap) {
        for hop in [CONNECTION, HOST, TRANSFER_ENCODING] {
            headers.remove(hop);
        }
        if !headers.contains_key(IDEMPOTENCY_KEY) {
            let key = uuid_in(headers, REQUEST_ID.as_str()).unwrap_or_else(Uuid::new_v4);
            headers.insert(IDEMPOTENCY_KEY, header(key));
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

fn uuid_in(headers: &HeaderMap, name: &str) -> Option<Uuid> {
    headers.get(name)?.to_str().ok()?.parse().ok().filter(|id: &Uuid| !id.is_nil())
}

fn header(id: Uuid) -> HeaderValue {
    HeaderValue::from_str(&id.hyphenated().to_string()).expect("invariant: a UUID is ASCII")
}

/// The relay's own error answer, in the form of the node's errors.
fn refuse(status: StatusCode, message: &str) -> Response<RelayBody> {
    let body = json!({ "error": { "code": "relay", "message": message, "type": "server_error" } });
    let mut response = Response::new(Either::Right(Full::new(body.to_string().into())));
    *response.status_mut() = status;
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relay() -> Relay {
        Relay {
            client: Client::builder(TokioExecutor::new()).build(HttpConnector::new()),
            upstream: Uri::from_static("http://node:1"),
            credential: Some(HeaderValue::from_static("Bearer own")),
            session: Uuid::from_u128(7),
        }
    }

    fn completed(given: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |&(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        let mut headers: HeaderMap = given.iter().map(pair).collect();
        relay().complete(&mut headers);
        headers
    }

    #[test]
    fn only_what_is_missing_is_added() {
        const OWN: &str = "11111111-1111-4111-8111-111111111111";
        let check = |given: &[(&'static str, &'static str)], name: HeaderName, expect: &str| {
            assert_eq!(completed(given)[name], *expect, "{given:?}");
        };
        check(&[("idempotency-key", OWN)], IDEMPOTENCY_KEY, OWN);
        check(&[("x-request-id", OWN)], IDEMPOTENCY_KEY, OWN);
        check(&[("x-service-session-id", OWN)], SESSION, OWN);
        check(&[("x-session-id", "mine"), ("x-openwebui-chat-id", OWN)], SESSION, OWN);
        check(&[], SESSION, "00000000-0000-0000-0000-000000000007");
        check(&[("authorization", "Bearer theirs")], AUTHORIZATION, "Bearer own");
        assert_ne!(
            completed(&[])[IDEMPOTENCY_KEY],
            completed(&[])[IDEMPOTENCY_KEY],
            "each request has its own key"
        );
        assert!(!completed(&[("host", "relay"), ("connection", "close")]).contains_key(HOST));
    }

    #[test]
    fn paths_and_queries_are_kept() {
        let target = relay().target(&Uri::from_static("/v1/models?limit=1")).unwrap();
        assert_eq!(target, "http://node:1/v1/models?limit=1");
    }
}

//! The gateway: what stands between a node and clients that do not know its ways. It adds a session
//! and an `Idempotency-Key` per call, which it keeps over its own retries and the client's, knows
//! models by name, and turns the spellings of other services into the node's. Each call carries a
//! credential of its own, which the node judges.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod answer;
mod assembled;
mod body;
mod calls;
mod chat;
mod client_keys;
mod dialects;
mod discovery;
#[cfg(test)]
mod in_process_tests;
mod json_members;
mod left_out;
mod log_line;
pub mod metrics_listener;
mod model_names;
mod origins;
mod prompts;
#[cfg(test)]
mod tests;
mod thinking;
mod tools;
mod upstream;
mod upstream_bounds;

use answer::{GatewayBody, Renaming, Rewriting, refuse};
use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use calls::{Calls, Exchange};
use cresset_telemetry::GatewayMetrics;
use cresset_telemetry::traces::Traces;
use cresset_transport::{HostGuard, HostRefusal, HttpSettings};
use dialects::{ApiDialect, Asked, Question, TranslatedStream, UpstreamError};
use hyper::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap, HeaderName,
    HeaderValue, TRANSFER_ENCODING,
};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, Uri};
use json_members::JsonMembers;
use log_line::GatewayLine;
use model_names::ModelNames;
use percent_encoding::percent_decode_str;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
pub use upstream::GatewayUpstream;
use upstream::{NodeConnections, StreamStop};
use uuid::Uuid;

/// How long a retry waits for its own broken predecessor to be noticed. Only a request that equals
/// one under way waits for it.
const DISCONNECT_GRACE: Duration = Duration::from_millis(20);
const CHAT: &str = "/v1/chat/completions";
const MODELS: &str = "/v1/models";
/// The beginning of the path of one model.
const MODEL: &str = "/v1/models/";
/// The member by which the node is asked to go on with the last message.
const CONTINUES: &str = "continue_final_message";
/// The member by which a node's own gateway asks it to go on with a text, without a template.
const PROMPT: &str = "prompt";
/// Paths of other services for what no model here does, by their beginnings.
const UNSUPPORTED_PATHS: [&str; 4] = ["/v1/embeddings", "/v1/images", "/v1/audio", "/api/embed"];
/// Paths at which Ollama's clients change its models.
const CHANGES_MODELS: [&str; 5] =
    ["/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"];
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const SESSION: HeaderName = HeaderName::from_static("x-service-session-id");
/// The header in which some clients send their key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// The header in which tools send a request id of their own.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The header in which OpenAI's clients count the retries of a call.
const RETRY_COUNT: &str = "x-stainless-retry-count";
/// Headers in which chat programs send the id of their conversation. The first one that holds a
/// UUID is used.
const FOREIGN_SESSIONS: [&str; 4] =
    ["x-openwebui-chat-id", "x-session-id", "x-correlation-id", "x-session-affinity"];

/// How a gateway runs.
#[derive(Debug)]
pub struct GatewayOptions {
    pub upstream: GatewayUpstream,
    /// Its limits: of connections, of the time for a request's head and body, of the body's size,
    /// and of the time after the end in which answers are sent.
    pub http: HttpSettings,
    /// Sent in place of the client's credential. Only for a gateway on a loopback address.
    pub key: Option<String>,
    /// Session for requests that name none.
    pub session: Uuid,
    /// Names besides localhost under which clients address the gateway.
    pub hosts: Vec<String>,
    /// Origins of web pages that may use the gateway, such as `http://localhost:3000`.
    pub origins: Vec<String>,
    /// Further names of models, as `gateway.aliases` has them.
    pub aliases: BTreeMap<String, String>,
    pub metrics: GatewayMetrics,
    pub traces: Traces,
}

/// Answers on `listener`, with TLS if there is a `tls`, until `shutdown`. Then it ends the answers
/// that are being sent.
pub async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    mut gateway: Gateway,
    shutdown: CancellationToken,
) {
    gateway.closing = shutdown.clone();
    let (limits, gateway) = (gateway.http.clone(), Arc::new(gateway));
    let linger = Duration::from_secs(limits.linger_seconds);
    let router = Router::new().fallback(move |request| {
        let gateway = gateway.clone();
        async move { gateway.answer(request).await }
    });
    let patience = async {
        shutdown.cancelled().await;
        sleep(linger).await;
    };
    tokio::select! {
        () = cresset_transport::serve(listener, tls, router, &limits, shutdown.clone()) => {}
        () = patience => {}
    }
}

#[derive(Debug)]
pub struct Gateway {
    node: NodeConnections,
    http: HttpSettings,
    /// `Bearer …`, sent in place of what is no key of a node; `None` passes on whatever comes.
    credential: Option<HeaderValue>,
    session: Uuid,
    names: HostGuard,
    origins: Vec<String>,
    aliases: BTreeMap<String, String>,
    metrics: GatewayMetrics,
    traces: Traces,
    calls: Arc<Calls>,
    /// Ends with `serve`.
    closing: CancellationToken,
}

impl Gateway {
    /// A gateway that listens on `listen`. The error is a sentence that says what to change.
    pub fn new(options: GatewayOptions, listen: SocketAddr) -> Result<Self, String> {
        if options.key.is_some() && !listen.ip().to_canonical().is_loopback() {
            return Err(format!(
                "{listen} can be reached from other machines, which could spend the key's \
                 credits: listen on 127.0.0.1, or give no key, so that each client sends its own"
            ));
        }
        let credential = options.key.map(|key| bearer(key.trim())).transpose()?;
        Ok(Self {
            node: NodeConnections::new(options.upstream)?,
            http: options.http,
            credential,
            session: options.session,
            names: HostGuard::new(listen, &options.hosts),
            origins: options.origins,
            aliases: options.aliases,
            metrics: options.metrics,
            traces: options.traces,
            calls: Arc::default(),
            closing: CancellationToken::new(),
        })
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let (mut head, body) = request.into_parts();
        let mut line = GatewayLine::begin(&head, self.metrics.clone(), &self.traces);
        line.trace.continue_in(&mut head.headers);
        let origin = origins::take_allowed(&mut head.headers, &self.origins);
        let dialect = ApiDialect::of_errors(&head);
        let mut answer = self.admit(head, body, origin.is_some(), &mut line).await;
        if let Some(dialect) = dialect {
            answer = answer::in_dialect(dialect, answer).await;
        }
        if let Some(origin) = origin {
            origins::allow_origin(&mut answer, origin);
        }
        answer::logged(answer, line).map(Body::new)
    }

    /// Answers what is addressed to the gateway; `is_page` if a page that may use it asks.
    async fn admit(
        &self,
        mut head: Parts,
        body: Body,
        is_page: bool,
        line: &mut GatewayLine,
    ) -> Response<GatewayBody> {
        if let Some(refusal) = self.names.refusal(&head.uri, &head.headers) {
            return refuse(StatusCode::FORBIDDEN, &with_setting(refusal), false);
        }
        if is_page && origins::is_preflight(&head) {
            return origins::preflight_response(&head);
        }
        let body = match self.read(&mut head, body).await {
            Ok(body) => body,
            Err(refusal) => return *refusal,
        };
        let answer = match ApiDialect::of(&head) {
            Some(dialect) => self.translate_request(dialect, head, &body, line).await,
            None if prompts::is_asked(&head) => self.tell_prompt(head, &body, line).await,
            None => self.pass(head, body, line).await,
        };
        answer.unwrap_or_else(|refusal| *refusal)
    }

    async fn read(&self, head: &mut Parts, body: Body) -> Result<Bytes, GatewayRefusal> {
        self.check_key(head).await?;
        body::read(&mut head.headers, body, &self.http).await
    }

    /// Answers a request in another service's way of asking.
    async fn translate_request(
        &self,
        dialect: ApiDialect,
        mut head: Parts,
        body: &Bytes,
        line: &mut GatewayLine,
    ) -> Result<Response<GatewayBody>, GatewayRefusal> {
        self.complete(&mut head.headers)?;
        let asked = dialect.read(body);
        let asked = asked.map_err(|why| refuse(StatusCode::BAD_REQUEST, &why, false))?;
        let Question { mut chat, writer, is_streamed, left_out, effort } = match asked {
            Asked::Question(question) => question,
            Asked::Echo(answer) => {
                let names = self.model_names(&head).await?;
                let model = answer["model"].as_str().unwrap_or_default();
                if !(model.is_empty() && dialect.has_one_model()) {
                    self.known_id(&names, model)?;
                }
                return Ok(answer::known(&answer));
            }
        };
        self.check_raw(&chat)?;
        if dialect.has_one_model() {
            self.add_only_model(&head, &mut chat).await?;
        }
        head.uri = Uri::from_static(CHAT);
        head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        chat.add("stream", &true);
        line.left_out = left_out;
        let model = chat.text("model").unwrap_or_default();
        let (body, _) = self.translate(&mut head, chat, effort, line).await?;
        let (answer, exchange) = self.send(&mut head, &body).await?;
        if !answer.status().is_success() {
            return Ok(answer::passed_on(answer, exchange, None));
        }
        if is_streamed {
            let stream = TranslatedStream::new(writer, model);
            return Ok(answer::translated(answer, exchange, stream));
        }
        assembled::assembled(answer, exchange, writer, model, line).await
    }

    async fn pass(
        &self,
        mut head: Parts,
        body: Bytes,
        line: &mut GatewayLine,
    ) -> Result<Response<GatewayBody>, GatewayRefusal> {
        self.complete(&mut head.headers)?;
        if head.uri.path() == MODEL {
            // Some clients end each path with a slash.
            let query = head.uri.query().map(|query| format!("?{query}")).unwrap_or_default();
            head.uri = format!("{MODELS}{query}").parse().unwrap_or(Uri::from_static(MODELS));
        }
        let path = head.uri.path();
        if UNSUPPORTED_PATHS.iter().any(|beginning| path.starts_with(beginning)) {
            let why = "models here generate text only: turn embeddings, images and audio off in \
                       the client, or send them to another service";
            return Err(refuse(StatusCode::NOT_FOUND, why, false).into());
        }
        if CHANGES_MODELS.contains(&path) {
            let why = "clients change no models here: the node's operator fetches them with \
                       `cresset models pull`, and GET /api/tags lists those there are";
            return Err(refuse(StatusCode::NOT_FOUND, why, false).into());
        }
        if let Some(answer) = self.discover(&head, &body).await? {
            return Ok(answer);
        }
        if path == MODELS && head.method == Method::GET {
            return self.list(&head).await;
        }
        if let Some(name) = asked_model(&head) {
            return self.show(head, name, line).await;
        }
        let is_chat = path == CHAT && head.method == Method::POST;
        // A body that is no object goes on as it is: the node says what is wrong with it.
        let (body, renaming) = match serde_json::from_slice(&body) {
            Ok(request) if is_chat => {
                check_messages(&request)?;
                self.translate(&mut head, request, thinking::EFFORT, line).await?
            }
            _ => (body, None),
        };
        let (answer, exchange) = self.send(&mut head, &body).await?;
        Ok(answer::passed_on(answer, exchange, renaming.map(Rewriting::Name)))
    }

    /// The node's list of models, with names in place of ids.
    async fn list(&self, head: &Parts) -> Result<Response<GatewayBody>, GatewayRefusal> {
        let names = self.model_names(head).await?;
        let answer = self.node.send(head, &Bytes::new()).await?;
        let (mut head, body) = upstream::collected(answer).await?.into_parts();
        let Ok(mut page) = serde_json::from_slice::<Value>(&body) else {
            return Ok(answer::whole(head, body));
        };
        if let Value::Array(models) = &mut page["data"] {
            names.rename(models);
        }
        head.headers.remove(CONTENT_LENGTH);
        Ok(answer::whole(head, page.to_string().into()))
    }

    /// The node's description of the model `name`, with the name in place of the id.
    async fn show(
        &self,
        mut head: Parts,
        name: String,
        line: &mut GatewayLine,
    ) -> Result<Response<GatewayBody>, GatewayRefusal> {
        let names = self.model_names(&head).await?;
        let id = self.known_id(&names, &name)?;
        let path = format!("{MODEL}{id}");
        let why = "the node lists an id that cannot stand in a path";
        head.uri = path.parse().map_err(|_| refuse(StatusCode::BAD_GATEWAY, why, false))?;
        let answer = self.node.send(&head, &Bytes::new()).await?;
        let (mut head, body) = upstream::collected(answer).await?.into_parts();
        let Ok(mut model) = serde_json::from_slice::<JsonMembers>(&body) else {
            return Ok(answer::whole(head, body));
        };
        model.set("id", &name);
        line.model = Some(name);
        head.headers.remove(CONTENT_LENGTH);
        let text = serde_json::to_vec(&model).expect("invariant: members are JSON");
        Ok(answer::whole(head, text.into()))
    }

    fn known_id<'a>(&self, names: &'a ModelNames, name: &str) -> Result<&'a str, GatewayRefusal> {
        let why = || format!("the model is not known; this key can use: {names}");
        let known = names.id_with(&self.aliases, name);
        known.ok_or_else(|| refuse(StatusCode::NOT_FOUND, &why(), false).into())
    }

    async fn model_names(&self, head: &Parts) -> Result<ModelNames, GatewayRefusal> {
        Ok(ModelNames::of(&self.node.models(head).await?))
    }

    /// A chat request in the node's form, and how its answer names the model.
    async fn translate(
        &self,
        head: &mut Parts,
        mut request: JsonMembers,
        effort: &str,
        line: &mut GatewayLine,
    ) -> Result<(Bytes, Option<Renaming>), GatewayRefusal> {
        chat::translate(&mut request, &mut line.left_out)
            .map_err(|why| refuse(StatusCode::BAD_REQUEST, &why, false))?;
        let model = request.text("model");
        let name = model.as_ref().filter(|name| Uuid::parse_str(name).is_err());
        let mut renaming = None;
        if name.is_some() || thinking::is_asked(&request) {
            let names = self.model_names(head).await?;
            if let Some(name) = name {
                let id = self.known_id(&names, name)?;
                request.set("model", id);
                renaming = Some(Renaming::new(id, name));
            }
            let (thinks, max_output) = names.facts(&request.text("model").unwrap_or_default());
            thinking::settle(&mut request, thinks, effort, &mut line.left_out);
            if let Some(most) = max_output {
                chat::lower_tokens(&mut request, most);
            }
        }
        line.model = model;
        head.headers.remove(CONTENT_LENGTH);
        let text = serde_json::to_vec(&request).expect("invariant: members are JSON");
        Ok((text.into(), renaming))
    }

    /// Sends a request as part of its call. Where the run of a call was cancelled, its client
    /// stopped it, and this one wants another.
    async fn send(
        &self,
        head: &mut Parts,
        body: &Bytes,
    ) -> Result<(Response<Body>, Option<Exchange>), GatewayRefusal> {
        let mut exchange = self.exchange(head, body).await;
        let mut answer = self.node.send(head, body).await?;
        let Some(call) = &mut exchange else { return Ok((answer, None)) };
        if answer.status() == StatusCode::CONFLICT {
            let (refusal, text) = upstream::collected(answer).await?.into_parts();
            let why = UpstreamError::of_answer(&refusal, &text);
            answer = Response::from_parts(refusal, Body::from(text));
            if why.code == "request_cancelled" {
                call.renew(Uuid::new_v4());
                head.headers.insert(IDEMPOTENCY_KEY, header(call.key));
                answer = self.node.send(head, body).await?;
            }
        }
        let kind = answer.headers().get(CONTENT_TYPE);
        if kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream")) {
            // A relay may have asked again under a key that it derived.
            let run = uuid_in(answer.headers(), REQUEST_ID.as_str()).unwrap_or(call.key);
            call.stop = Some(StreamStop::new(&self.node, head, run, &self.closing));
        }
        Ok((answer, exchange))
    }

    /// The call that a completion request belongs to, whose key goes into the head. `None` for what
    /// costs nothing, and for requests whose client names the key itself.
    async fn exchange(&self, head: &mut Parts, body: &Bytes) -> Option<Exchange> {
        if head.method != Method::POST || head.headers.contains_key(IDEMPOTENCY_KEY) {
            return None;
        }
        let input = input_digest(head, body);
        let is_retry = retry_count(&head.headers) > 0;
        if !is_retry && self.calls.is_under_way(&input) {
            tokio::time::sleep(DISCONNECT_GRACE).await;
        }
        let fresh = uuid_in(&head.headers, REQUEST_ID.as_str()).unwrap_or_else(Uuid::new_v4);
        #[expect(clippy::disallowed_methods, reason = "calls are forgotten by age")]
        let now = Instant::now();
        let exchange = self.calls.join(input, is_retry, fresh, now);
        head.headers.insert(IDEMPOTENCY_KEY, header(exchange.key));
        Some(exchange)
    }

    /// Adds the session and the credential, and removes what belongs to the client's connection.
    fn complete(&self, headers: &mut HeaderMap) -> Result<(), GatewayRefusal> {
        for hop in [CONNECTION, HOST, TRANSFER_ENCODING] {
            headers.remove(hop);
        }
        if !headers.contains_key(SESSION) {
            let foreign = FOREIGN_SESSIONS.iter().find_map(|name| uuid_in(headers, name));
            headers.insert(SESSION, header(foreign.unwrap_or(self.session)));
        }
        if let Some(key) = client_keys::named(headers) {
            headers.insert(IDEMPOTENCY_KEY, header(key));
        }
        let api_key = headers.remove(API_KEY);
        if let Some(key) = api_key.filter(|_| !headers.contains_key(AUTHORIZATION)) {
            let credential = key.to_str().map_err(|_| ()).and_then(|k| bearer(k).map_err(|_| ()));
            let why = "x-api-key holds characters that no key has";
            let refused = |()| refuse(StatusCode::UNAUTHORIZED, why, false);
            headers.insert(AUTHORIZATION, credential.map_err(refused)?);
        }
        if let Some(own) = &self.credential
            && !headers.get(AUTHORIZATION).is_some_and(|sent| client_keys::is_like(sent, own))
        {
            headers.insert(AUTHORIZATION, own.clone());
        }
        Ok(())
    }
}

/// Why a request is not answered, and the setting that can allow it.
fn with_setting(refusal: HostRefusal) -> String {
    let setting = match refusal {
        HostRefusal::NoHost => return refusal.text().to_owned(),
        HostRefusal::ForeignName => "that name with gateway.names (cresset relay: --host)",
        HostRefusal::ForeignPage => {
            "the page's origin with gateway.origins (cresset relay: --origin)"
        }
    };
    format!("{}; or allow {setting}", refusal.text())
}

/// Refuses what the node takes from the other interfaces of its gateway alone.
fn check_messages(request: &JsonMembers) -> Result<(), GatewayRefusal> {
    match request.read::<Value>(PROMPT) {
        None | Some(Value::Null) => Ok(()),
        Some(_) => {
            let why = "prompt is for /v1/completions: send messages here";
            Err(refuse(StatusCode::BAD_REQUEST, why, false).into())
        }
    }
}

/// An answer of the gateway's own that ends a request.
type GatewayRefusal = Box<Response<GatewayBody>>;

/// The name by which a request asks for one model. An id is no name: the node knows it.
fn asked_model(head: &Parts) -> Option<String> {
    let name = head.uri.path().strip_prefix(MODEL).filter(|_| head.method == Method::GET)?;
    let name = percent_decode_str(name).decode_utf8().ok()?;
    Uuid::parse_str(&name).is_err().then(|| name.into_owned())
}

/// The `Authorization` header made of `key`.
fn bearer(key: &str) -> Result<HeaderValue, String> {
    let value = HeaderValue::from_str(&format!("Bearer {key}"));
    let mut value = value.map_err(|_| "the key holds characters that no key has".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
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

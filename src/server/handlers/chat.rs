//! `POST /v1/chat/completions`: reads a request, finds out whether it is new, and answers it.

use super::replay::{self, Known};
use crate::config::HttpSettings;
use crate::ids::SessionId;
use crate::ledger::fingerprint::{canonicalise, fingerprint};
use crate::ledger::state::Crashes;
use crate::ledger::{RequestKey, RequestRecord};
use crate::request::live::{LiveRequest, NotAdmitted, Subscription};
use crate::request::services::Node;
use crate::request::{lifecycle as drive, plan as prepare};
use crate::server::auth::Caller;
use crate::server::error::ApiError;
use crate::server::headers;
use crate::server::sse;
use crate::server::wire::chat_request::ChatRequest;
use axum::body::Body;
use axum::extract::{Extension, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use std::sync::Arc;
use std::time::Duration;

/// A well-formed request, not yet looked up.
#[derive(Debug)]
pub struct Call {
    pub caller: Arc<Caller>,
    pub key: RequestKey,
    pub session: SessionId,
    pub fingerprint: [u8; 32],
    pub request: ChatRequest,
}

pub async fn create(
    State(node): State<Arc<Node>>,
    Extension(caller): Extension<Arc<Caller>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let call = read(&node, caller, &parts, body).await?;
    let mut response = answer(&node, &call).await?;
    if let Some(names) = ignored_names(&call.request.ignored) {
        response.headers_mut().insert("x-ignored-params", names);
    }
    Ok(response)
}

async fn read(
    node: &Node,
    caller: Arc<Caller>,
    parts: &Parts,
    body: Body,
) -> Result<Call, ApiError> {
    let key = caller.key(headers::idempotency_key(&parts.headers)?);
    let session = headers::session(&parts.headers, &node.config.service_name)?;
    headers::refuse_cache_namespaces(&parts.headers)?;
    node.fuse.check(&caller.account)?;
    let body = read_body(&node.config.http, parts, body).await?;
    let tree = canonicalise(&body).map_err(|error| ApiError::InvalidRequest {
        message: format!("The body was not accepted as JSON: {error}."),
        param: None,
    })?;
    let request = ChatRequest::parse(&tree)?;
    let fingerprint = fingerprint(parts.method.as_str(), parts.uri.path(), session, &tree);
    Ok(Call { caller, key, session, fingerprint, request })
}

async fn read_body(limits: &HttpSettings, parts: &Parts, body: Body) -> Result<Bytes, ApiError> {
    let limit = limits.max_body_bytes;
    let declared = parts
        .headers
        .get(header::CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    // Refused before a byte of it is asked for.
    if declared.is_some_and(|length| length > limit) {
        return Err(ApiError::RequestTooLarge { limit });
    }
    headers::check_media_type(&parts.headers)?;
    let time = Duration::from_secs(limits.body_seconds);
    tokio::time::timeout(time, take(body, limit)).await.unwrap_or_else(|_| {
        Err(ApiError::InvalidRequest {
            message: "The body did not arrive in time.".into(),
            param: None,
        })
    })
}

async fn take(mut body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let refuse = |message: &str| ApiError::InvalidRequest { message: message.into(), param: None };
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| refuse("The body could not be read."))?;
        let data = frame.into_data().map_err(|_| refuse("Send the body without trailers."))?;
        if bytes.len() + data.len() > limit {
            return Err(ApiError::RequestTooLarge { limit });
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}

/// Finds the request among the live ones and in the ledger, or makes it live. Equal requests that
/// arrive together meet in the hub: one is admitted, the others join it, or try again by themselves
/// when it is refused.
async fn answer(node: &Arc<Node>, call: &Call) -> Result<Response, ApiError> {
    let mut looked_again = false;
    loop {
        if let Some(live) = node.hub.get(&call.key) {
            match join(node, call, &live).await? {
                Some(response) => return Ok(response),
                None => continue,
            }
        }
        match recall(node, call).await {
            Ok(Some(record)) => {
                return replay::answer(node, &record, call.request.include_usage).await;
            }
            Ok(None) => {}
            // It went live after the hub was asked, or has ended since it was read.
            Err(ApiError::RequestInProgress) if !std::mem::replace(&mut looked_again, true) => {
                continue;
            }
            Err(error) => return Err(error),
        }
        let job = prepare::prepare(node, call).await?;
        if let Some(response) = run(node, call, job).await? {
            return Ok(response);
        }
    }
}

/// The request's record when it has its answer; `None` when it may run.
async fn recall(node: &Node, call: &Call) -> Result<Option<RequestRecord>, ApiError> {
    let ledger = node.store.read().await?;
    if let Some(record) = ledger.request(&call.key).await? {
        match replay::judge(node, &record, &call.fingerprint)? {
            Known::Answered => return Ok(Some(record)),
            Known::MayRetry => {}
        }
    }
    // Admission refuses it, too, but by then the engine has seen it, and may be down again.
    let crashes = ledger.crashes(call.key.account, &call.fingerprint).await?;
    let refused = crashes.is_some_and(Crashes::is_refused);
    if refused { Err(ApiError::AttemptsExhausted) } else { Ok(None) }
}

/// Answers from a running request; `None` when it was not admitted.
async fn join(
    node: &Node,
    call: &Call,
    live: &Arc<LiveRequest>,
) -> Result<Option<Response>, ApiError> {
    if live.admitted().await.is_err() {
        return Ok(None);
    }
    if live.fingerprint != call.fingerprint {
        return Err(ApiError::IdempotencyKeyReused);
    }
    node.metrics.attaches.inc();
    let seat = if live.stream { Some(listen(node, live)?) } else { None };
    follow(node, call, live, seat).await.map(Some)
}

/// Starts the request and answers from it; `None` when another one turned out to be first.
async fn run(node: &Arc<Node>, call: &Call, job: drive::Job) -> Result<Option<Response>, ApiError> {
    let live = job.live.clone();
    // Before the drive starts: a stream without listeners would count as abandoned.
    let seat = if live.stream { Some(listen(node, &live)?) } else { None };
    if !node.hub.claim(&live) {
        return Ok(None);
    }
    node.drives.spawn(drive::drive(node.clone(), job));
    match live.admitted().await {
        Ok(()) => follow(node, call, &live, seat).await.map(Some),
        Err(NotAdmitted::Superseded) => Ok(None),
        Err(NotAdmitted::Refused(error)) => Err(error),
    }
}

fn listen(node: &Node, live: &Arc<LiveRequest>) -> Result<Subscription, ApiError> {
    Subscription::new(live, node.config.requests.max_subscribers).ok_or(ApiError::RequestInProgress)
}

async fn follow(
    node: &Node,
    call: &Call,
    live: &LiveRequest,
    seat: Option<Subscription>,
) -> Result<Response, ApiError> {
    let Some(subscription) = seat else { return live.ended().await.map(replay::json) };
    let silence = Duration::from_secs(node.config.http.keep_alive_seconds);
    Ok(sse::response(sse::follow(subscription, call.key.request.0, silence)))
}

/// Names told in one header.
const MAX_IGNORED: usize = 32;

fn ignored_names(ignored: &[String]) -> Option<HeaderValue> {
    let names: Vec<&str> = ignored.iter().take(MAX_IGNORED).map(String::as_str).collect();
    (!names.is_empty()).then(|| HeaderValue::from_str(&names.join(", ")).ok()).flatten()
}

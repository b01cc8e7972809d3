//! `POST /v1/chat/completions`.

use crate::access_log::AccessLine;
use crate::error::ApiError;
use crate::forward::Onward;
use crate::headers::NamedRequest;
use crate::sse;
use crate::wire::chat_request::ChatRequest;
use crate::wire::completion::{ChunkWriter, Completion};
use crate::wire::json::{JsonTree, fingerprint};
use crate::{Api, ChatLeeway};
use axum::extract::{Extension, Request, State};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use cresset_request::{AnswerSource, Caller, IncomingRequest, Plan, PlanInForce, Services};
use std::sync::Arc;
use std::time::Duration;

/// The parameters are extracted from left to right, so that is the order of their refusals.
pub async fn create(
    State(Api { services, settings }): State<Api>,
    Extension(caller): Extension<Arc<Caller>>,
    Extension(line): Extension<Arc<AccessLine>>,
    NamedRequest { id, session, disconnect_grace }: NamedRequest,
    Onward(onward): Onward,
    request: Request,
) -> Result<Response, ApiError> {
    // 1. The account's rate. The request's own headers are checked already.
    let (head, body) = request.into_parts();
    let plan = count_request(&services, &caller)?;

    // 2. The body: its size and media type, then strict JSON, then the dialect's fields.
    let (tree, body) = JsonTree::read(&settings.http, &head.headers, body).await?;
    let fingerprint = fingerprint(head.method.as_str(), head.uri.path(), session, &tree);
    let ChatRequest { input, include_usage, mut ignored, .. } =
        read(&services, &plan.limits, &settings.leeway, &tree)?;
    if let Some(model) = input.model.and_then(|id| services.pool.offered(id)) {
        ignored.extend(input.without_effect(&model.text));
    }
    line.model(input.model);
    // The bytes are kept as long as they may be passed on.
    let onward = onward.map(|forwarder| (forwarder, body));

    // 3. Attach to the request, replay its answer, or run it, here or at another node.
    let incoming = IncomingRequest {
        key: caller.key(id),
        caller,
        plan,
        session,
        fingerprint,
        input,
        disconnect_grace,
        render: Completion::render,
        trace: line.trace.clone(),
        may_go_elsewhere: onward.is_some(),
    };
    let found = cresset_request::find_or_start(&services, &incoming).await?;

    // 4. Answer in this dialect, in one piece or as a stream.
    let mut response = match found {
        AnswerSource::Body { body, figures } => {
            line.completed(figures);
            json(body)
        }
        AnswerSource::Stored { body, stream } => {
            line.replayed();
            replay(body, stream.then_some(include_usage))?
        }
        AnswerSource::Stream { created_at, prompt_tokens, deltas } => {
            let model = incoming.input.model.ok_or(ApiError::ModelNotFound)?;
            let chunks = ChunkWriter::new(id, created_at.seconds(), model, include_usage);
            let silence = Duration::from_secs(settings.http.keep_alive_seconds);
            let mut response = sse::response(sse::follow(deltas, chunks, silence, line));
            if settings.leeway.is_lenient {
                response.headers_mut().insert("x-prompt-tokens", prompt_tokens.into());
            }
            response
        }
        AnswerSource::Elsewhere { nodes, unreachable } => {
            let Some((forwarder, body)) = onward else { return Err(unreachable.into()) };
            let answer = forwarder.send(&nodes, &head, &body, &line).await;
            return answer.ok_or_else(|| unreachable.into());
        }
    };
    if let Some(names) = ignored_names(&ignored) {
        response.headers_mut().insert("x-ignored-params", names);
    }
    Ok(response)
}

/// Counts a request among those of its account, and returns the account's plan.
pub(super) fn count_request(
    services: &Services,
    caller: &Caller,
) -> Result<Arc<PlanInForce>, ApiError> {
    let plan = services.plans.of(&caller.account);
    plan.check_rate(caller.account.id).map_err(|retry_after| {
        services.metrics.limit_reached(&plan.name, "requests_per_minute");
        let Plan { requests_per_minute: per_minute, burst, .. } = plan.limits;
        ApiError::RateLimited { per_minute, burst, retry_after }
    })?;
    Ok(plan)
}

pub(super) fn read(
    services: &Services,
    plan: &Plan,
    leeway: &ChatLeeway,
    body: &JsonTree,
) -> Result<ChatRequest, ApiError> {
    let read = ChatRequest::parse_within(body, &leeway.bounds);
    let mut request = read.map_err(|error| with_model_id(error, services, plan, body))?;
    request.input.is_lenient = leeway.is_lenient;
    Ok(request)
}

/// Adds the id of a model that the client called by its name.
fn with_model_id(error: ApiError, services: &Services, plan: &Plan, body: &JsonTree) -> ApiError {
    let JsonTree::Object(fields) = body else { return error };
    let (Some(JsonTree::String(name)), ApiError::InvalidRequest { param: Some(param), .. }) =
        (fields.get("model"), &error)
    else {
        return error;
    };
    let models = services.models_of(plan);
    let named = models.iter().find(|model| model.qualified.manifest().name == *name);
    match named.filter(|_| param == "model") {
        Some(model) => {
            let id = model.qualified.id();
            ApiError::invalid("model", format!("model must be the model's id, which is {id}."))
        }
        None => error,
    }
}

/// The stored answer: the same bytes, or the content of the same chunks as a stream.
fn replay(body: Bytes, stream: Option<bool>) -> Result<Response, ApiError> {
    let mut response = match stream {
        None => json(body),
        Some(include_usage) => {
            let completion: Completion =
                serde_json::from_slice(&body).map_err(|_| ApiError::ControlPlaneUnavailable)?;
            sse::response(sse::whole(&completion.chunks(include_usage)))
        }
    };
    response.headers_mut().insert("idempotent-replayed", HeaderValue::from_static("true"));
    Ok(response)
}

/// A finished body as it is.
fn json(body: Bytes) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body).into_response()
}

/// Names in one header: with this many it stays far below the 8 KiB that proxies accept.
const MAX_IGNORED: usize = 32;

fn ignored_names(ignored: &[String]) -> Option<HeaderValue> {
    let names: Vec<&str> = ignored.iter().take(MAX_IGNORED).map(String::as_str).collect();
    (!names.is_empty()).then(|| HeaderValue::from_str(&names.join(", ")).ok()).flatten()
}

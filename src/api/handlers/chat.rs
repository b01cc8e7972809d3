//! `POST /v1/chat/completions`.

use crate::access_log::AccessLine;
use crate::error::ApiError;
use crate::forward::{Forwarder, Onward};
use crate::headers::{IDEMPOTENCY_KEY, NamedRequest, SESSION};
use crate::sse;
use crate::wire::chat_request::ChatRequest;
use crate::wire::completion::{ChunkWriter, Completion};
use crate::wire::json::{JsonField, JsonTree, fingerprint};
use crate::{Api, ApiSettings, ChatLeeway};
use axum::extract::{Extension, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use cresset_request::{
    AnswerSource, Caller, GenerationInput, IncomingRequest, Plan, PlanInForce, Services,
};
use std::sync::Arc;
use std::time::Duration;

/// What the gateway does for requests that are refused here.
const ADDS: &str = "adds the headers that are needed and knows models by name";
const RELAY: &str = "A client that cannot send headers of its own can be pointed at \
                     `cresset relay`, which adds them.";
/// How long the body of a request is waited for that is refused for its headers.
const BODY_PATIENCE: Duration = Duration::from_secs(1);

/// The parameters are extracted from left to right, so that is the order of their refusals.
pub async fn create(
    State(api): State<Api>,
    Extension(caller): Extension<Arc<Caller>>,
    Extension(line): Extension<Arc<AccessLine>>,
    named: Result<NamedRequest, ApiError>,
    Onward(onward): Onward,
    request: Request,
) -> Result<Response, ApiError> {
    match named {
        Ok(named) => answer(api, caller, line, named, onward, request).await,
        Err(refusal) => Err(explained(&api, &caller, refusal, request).await),
    }
}

async fn answer(
    Api { services, settings }: Api,
    caller: Arc<Caller>,
    line: Arc<AccessLine>,
    NamedRequest { id, session, disconnect_grace }: NamedRequest,
    onward: Option<Arc<Forwarder>>,
    request: Request,
) -> Result<Response, ApiError> {
    // 1. The account's rate. The request's own headers are checked already.
    let (head, body) = request.into_parts();
    let plan = count_request(&services, &caller)?;

    // 2. The body: its size and media type, then strict JSON, then the dialect's fields.
    let (tree, body) = JsonTree::read(&settings.http, &head.headers, body).await?;
    let fingerprint = fingerprint(head.method.as_str(), head.uri.path(), session, &tree);
    let read = read(&services, &plan.limits, &settings.leeway, &tree);
    let ChatRequest { input, include_usage, mut ignored, .. } =
        read.map_err(|refusal| with_gateway(refusal, &settings, &head))?;
    ignored.extend(without_effect(&services, &input));
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
            let stream = sse::response(sse::follow(deltas, chunks, silence, line));
            if settings.leeway.is_lenient { told(stream, prompt_tokens) } else { stream }
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

/// The members that the model's template writes nowhere.
fn without_effect(services: &Services, input: &GenerationInput) -> Vec<String> {
    let model = input.model.and_then(|id| services.pool.offered(id));
    model.map_or_else(Vec::new, |model| input.without_effect(&model.text))
}

/// The answer that tells how many tokens its prompt has.
fn told(mut response: Response, prompt_tokens: u32) -> Response {
    response.headers_mut().insert("x-prompt-tokens", prompt_tokens.into());
    response
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

/// The refusal of a request for its headers, with what else is seen at once: that its model is
/// named.
async fn explained(api: &Api, caller: &Caller, refusal: ApiError, request: Request) -> ApiError {
    let (head, body) = request.into_parts();
    // A client that asks before it sends its body is answered before.
    let is_sent = !head.headers.contains_key(header::EXPECT);
    let reading = JsonTree::read(&api.settings.http, &head.headers, body);
    let read = tokio::time::timeout(BODY_PATIENCE, reading);
    let read = if is_sent { read.await.ok().and_then(Result::ok) } else { None };
    let refusal = match read.and_then(|(tree, _)| wrong_model(api, caller, &tree)) {
        Some(model) => refusal.and(&model.to_string()),
        None => refusal,
    };
    with_gateway(refusal, &api.settings, &head)
}

/// Why the model of a body is no id.
fn wrong_model(api: &Api, caller: &Caller, body: &JsonTree) -> Option<ApiError> {
    let JsonTree::Object(members) = body else { return None };
    let bounds = &api.settings.leeway.bounds;
    let field = JsonField { path: "model".into(), value: members.get("model")?, bounds };
    let error = field.uuid().err()?;
    let plan = api.services.plans.of(&caller.account);
    Some(with_model_id(error, &api.services, &plan.limits, body))
}

/// Tells of the gateway where it helps.
fn with_gateway(refusal: ApiError, settings: &ApiSettings, head: &Parts) -> ApiError {
    let ApiError::InvalidRequest { param: Some(param), .. } = &refusal else { return refusal };
    let is_header = [IDEMPOTENCY_KEY, SESSION].contains(&param.as_str());
    if !is_header && param != "model" {
        return refusal;
    }
    match settings.gateway.sentence(head, ADDS) {
        Some(gateway) => refusal.and(&gateway),
        None if is_header => refusal.and(RELAY),
        None => refusal,
    }
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

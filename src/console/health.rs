//! The operator listener: whether the process runs, whether it takes new work, its metrics, and a
//! description of its public surface.

use crate::{Console, page, remote};
use axum::extract::State;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use cresset_commands::{metrics, not_ready_because};
use cresset_telemetry::metrics_text;
use serde_json::{Value, json};
use std::sync::Arc;

/// `/healthz`, `/readyz`, `/metrics` and `/openapi.json`. Mounted on the operator's own listener
/// only, by `start`.
pub(super) fn router(live: Arc<Console>) -> Router {
    Router::new()
        .route("/healthz", get(async || alive()))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .route("/openapi.json", get(openapi))
        .with_state(live.clone())
        .merge(remote::router(live.clone()))
        .merge(page::router(live))
}

/// Answers 200 as long as the process answers at all.
pub(super) fn alive() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// Answers 200 only while new work would be taken: engine alive, ledger committing, a qualified
/// model loaded, not draining.
async fn readyz(State(live): State<Arc<Console>>) -> Response {
    match not_ready_because(&live) {
        None => Json(json!({ "status": "ok" })).into_response(),
        reason => unavailable(reason.as_deref()),
    }
}

pub(super) fn unavailable(reason: Option<&str>) -> Response {
    let body = json!({ "status": "unavailable", "message": reason });
    (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")], Json(body)).into_response()
}

/// The public surface as this node is configured.
async fn openapi(State(live): State<Arc<Console>>) -> Json<Value> {
    Json((live.openapi)())
}

async fn scrape(State(live): State<Arc<Console>>, headers: HeaderMap) -> Response {
    metrics::sample_care(&live);
    metrics_text(&headers, metrics::text(&live.node).await).into_response()
}

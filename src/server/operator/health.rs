//! The operator listener: whether the process runs, whether it takes new work, its metrics, and a
//! description of its public surface.

use super::{Live, metrics, metrics_text, page, remote, status};
use crate::server::openapi::document;
use axum::extract::State;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use std::sync::Arc;

/// `/healthz`, `/readyz`, `/metrics` and `/openapi.json`. Mounted on the operator's own listener
/// only, by `start`.
pub(super) fn router(live: Arc<Live>) -> Router {
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
async fn readyz(State(live): State<Arc<Live>>) -> Response {
    match status::not_ready_because(&live) {
        None => Json(json!({ "status": "ok" })).into_response(),
        reason => unavailable(reason.as_deref()),
    }
}

pub(super) fn unavailable(reason: Option<&str>) -> Response {
    let body = json!({ "status": "unavailable", "message": reason });
    (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")], Json(body)).into_response()
}

/// The public surface as this node is configured.
async fn openapi(State(live): State<Arc<Live>>) -> Json<Value> {
    Json(document(&live.config.api()))
}

async fn scrape(State(live): State<Arc<Live>>, headers: HeaderMap) -> Response {
    metrics::sample_care(&live);
    metrics_text::answer(&headers, metrics::text(&live.node).await).into_response()
}

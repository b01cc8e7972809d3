//! The operator listener: whether the process runs, whether it takes new work, its metrics, and a
//! description of its public surface.

use super::{Live, metrics, status};
use crate::server::openapi::document;
use crate::server::own_names::OwnNames;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use std::sync::Arc;

/// The media type Prometheus asks for.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// `/healthz`, `/readyz`, `/metrics` and `/openapi.json`. Mounted on the operator's own listener
/// only.
pub fn router(live: Arc<Live>) -> Router {
    let names = OwnNames::new(live.operator, &live.node.config.listen.operator_names);
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .route("/openapi.json", get(openapi))
        .layer(from_fn_with_state(Arc::new(names), require_own_name))
        .with_state(live)
}

/// Refuses requests that a web page of another site could have sent.
async fn require_own_name(
    State(names): State<Arc<OwnNames>>,
    request: Request,
    next: Next,
) -> Response {
    match names.refusal(request.uri(), request.headers()) {
        None => next.run(request).await,
        Some(why) => {
            let message = format!("{why}; further names stand in listen.operator_names");
            let body = json!({ "status": "forbidden", "message": message });
            (StatusCode::FORBIDDEN, Json(body)).into_response()
        }
    }
}

/// Answers 200 as long as the process answers at all.
async fn healthz() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

/// Answers 200 only while new work would be taken: engine alive, ledger committing, a qualified
/// model loaded, not draining.
async fn readyz(State(live): State<Arc<Live>>) -> Response {
    match status::not_ready_because(&live.node) {
        None => Json(json!({ "status": "ok" })).into_response(),
        Some(reason) => {
            let body = json!({ "status": "unavailable", "message": reason });
            let status = StatusCode::SERVICE_UNAVAILABLE;
            (status, [(RETRY_AFTER, "1")], Json(body)).into_response()
        }
    }
}

/// The public surface as this node is configured.
async fn openapi(State(live): State<Arc<Live>>) -> Json<Value> {
    Json(document(&live.node.config))
}

async fn scrape(State(live): State<Arc<Live>>) -> Response {
    ([(CONTENT_TYPE, OPEN_METRICS)], metrics::text(&live.node).await).into_response()
}

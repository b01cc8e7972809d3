//! The operator's surfaces from the first moment of a start. Until the node is assembled they
//! answer what the start is doing; then they pass everything on to the node.

use crate::{Console, health, socket};
use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use cresset_commands::{AdminCommand, AdminError, StartState};
use cresset_transport::HostGuard;
use serde_json::json;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use tower::ServiceExt;

/// The routes of the operator's listener and of the operator's socket, whatever the node's state.
pub struct OperatorRoutes {
    start: Arc<StartState>,
    /// The listener's and the socket's routes of the assembled node.
    node: OnceLock<[Router; 2]>,
}

impl OperatorRoutes {
    pub fn new(start: Arc<StartState>) -> Arc<Self> {
        Arc::new(Self { start, node: OnceLock::new() })
    }

    /// Passes everything on to the node from now on.
    pub fn pass_on(&self, console: &Arc<Console>) {
        self.node
            .get_or_init(|| [health::router(console.clone()), socket::router(console.clone())]);
    }

    /// Health, readiness, metrics and the OpenAPI document. Requests that a web page of another
    /// site could have sent are refused.
    pub fn listener(self: &Arc<Self>, address: SocketAddr, operator_names: &[String]) -> Router {
        let names = HostGuard::new(address, operator_names);
        Router::new()
            .fallback(async |State(routes): State<Arc<Self>>, request: Request| {
                match routes.node.get() {
                    Some([listener, _]) => answered(listener, request).await,
                    None => starting_health(&routes.start, request.uri().path()),
                }
            })
            .layer(from_fn_with_state(Arc::new(names), require_own_name))
            .with_state(self.clone())
    }

    /// The commands of operators.
    pub fn socket(self: &Arc<Self>) -> Router {
        Router::new()
            .fallback(async |State(routes): State<Arc<Self>>, request: Request| {
                match routes.node.get() {
                    Some([_, socket]) => answered(socket, request).await,
                    None => starting_command(&routes.start, request).await,
                }
            })
            .with_state(self.clone())
    }
}

async fn answered(routes: &Router, request: Request) -> Response {
    let Ok(answer) = routes.clone().oneshot(request).await;
    answer
}

fn starting_health(start: &StartState, path: &str) -> Response {
    if path == "/healthz" {
        return health::alive().into_response();
    }
    health::unavailable(start.not_ready_because().as_deref())
}

/// Answers the status; every other command needs the ledger.
async fn starting_command(start: &StartState, request: Request) -> Response {
    let body = to_bytes(request.into_body(), socket::MAX_COMMAND_BYTES).await;
    if let Ok(AdminCommand::Status) = serde_json::from_slice(&body.unwrap_or_default()) {
        return Json(cresset_commands::starting(start)).into_response();
    }
    socket::refused(&AdminError::Starting(start.not_ready_because().unwrap_or_default()))
}

/// Refuses requests that a web page of another site could have sent.
async fn require_own_name(
    State(names): State<Arc<HostGuard>>,
    request: Request,
    next: Next,
) -> Response {
    match names.refusal(request.uri(), request.headers()) {
        None => next.run(request).await,
        Some(why) => {
            let message = format!("{}; further names stand in listen.operator_names", why.text());
            let body = json!({ "status": "forbidden", "message": message });
            (StatusCode::FORBIDDEN, Json(body)).into_response()
        }
    }
}

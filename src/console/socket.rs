//! The operator socket: one POST route on a Unix socket that only the node's own user may open.

use crate::Console;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use bytes::Bytes;
use cresset_commands::socket::{ROUTE, path, remove};
use cresset_commands::{Actor, AdminError, Live, Operator};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

/// Bytes of the longest command that a node takes while it starts; ids, names and paths are short.
pub(super) const MAX_COMMAND_BYTES: usize = 64 << 10;

/// Answers until `shutdown`, then removes the socket.
pub async fn serve(
    listener: UnixListener,
    routes: Router,
    data_dir: &Path,
    shutdown: CancellationToken,
) {
    let served =
        axum::serve(listener, routes).with_graceful_shutdown(shutdown.cancelled_owned()).await;
    if let Err(error) = served {
        tracing::error!(%error, "the operator socket stopped");
    }
    let _ = remove(&path(data_dir));
}

/// The one route. It is mounted by `start`.
pub(super) fn router(live: Arc<Console>) -> Router {
    Router::new().route(ROUTE, post(command)).with_state(live)
}

async fn command(State(live): State<Arc<Console>>, body: Bytes) -> Response {
    execute(&live, &Actor::node_user(), &body).await
}

/// Executes the command in a request's body and answers.
pub(super) async fn execute(live: &Live, actor: &Actor, body: &[u8]) -> Response {
    match execute_json(&Operator::of(live), actor, body).await {
        Ok(value) => Json(value).into_response(),
        Err(error) => refused(&error),
    }
}

async fn execute_json(
    operator: &Operator<'_>,
    actor: &Actor,
    body: &[u8],
) -> Result<Value, AdminError> {
    let unknown = |error: serde_json::Error| {
        AdminError::Invalid(format!("the running node does not know this command: {error}"))
    };
    let said: Value = serde_json::from_slice(body).map_err(unknown)?;
    let command = operator.resolve_names(said).await?;
    operator.execute_for(actor, serde_json::from_value(command).map_err(unknown)?).await
}

pub(super) fn refused(error: &AdminError) -> Response {
    (status(error), Json(error)).into_response()
}

fn status(error: &AdminError) -> StatusCode {
    match error {
        AdminError::NotFound(_) => StatusCode::NOT_FOUND,
        AdminError::Refused(_) => StatusCode::CONFLICT,
        AdminError::Invalid(_) => StatusCode::BAD_REQUEST,
        AdminError::Unauthorized(_) => StatusCode::UNAUTHORIZED,
        AdminError::Forbidden(_) => StatusCode::FORBIDDEN,
        AdminError::Unavailable(_) | AdminError::Starting(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}

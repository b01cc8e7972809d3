//! The operator socket: one POST route on a Unix socket that only the node's own user may open.

use super::{Actor, AdminError, Live, Operator, account_names};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use bytes::Bytes;
use serde_json::Value;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

/// Path of the one route.
pub const ROUTE: &str = "/command";

/// Bytes of the longest command that a node takes while it starts; ids, names and paths are short.
pub(super) const MAX_COMMAND_BYTES: usize = 64 << 10;

pub fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("operator.sock")
}

/// Binds the socket. The caller holds the folder's lock, so an existing socket belongs to a node
/// that has ended, and is replaced.
pub fn bind(data_dir: &Path) -> io::Result<UnixListener> {
    bind_at(&path(data_dir))
}

/// A socket that only the node's own user may open.
pub fn bind_at(path: &Path) -> io::Result<UnixListener> {
    // The socket is renamed into place once its mode is right, so that it accepts no connection
    // before.
    let unfinished = path.with_extension("sock.new");
    remove(&unfinished)?;
    let listener = UnixListener::bind(&unfinished)?;
    std::fs::set_permissions(&unfinished, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&unfinished, path)?;
    Ok(listener)
}

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
pub(super) fn router(live: Arc<Live>) -> Router {
    Router::new().route(ROUTE, post(command)).with_state(live)
}

async fn command(State(live): State<Arc<Live>>, body: Bytes) -> Response {
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
    let command = account_names::resolved(operator, said).await?;
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

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

//! `GET` and `DELETE /v1/requests/{id}`: where a request stands, and its end on demand.

use crate::ids::RequestId;
use crate::ledger::{AttemptState, Command, Outcome, RequestKey, RequestRecord};
use crate::request::live::Ending;
use crate::request::services::Node;
use crate::server::auth::Caller;
use crate::server::error::ApiError;
use crate::server::wire::Json;
use crate::server::wire::objects::RequestObject;
use crate::server::wire::query::PathId;
use axum::extract::{Extension, State};
use axum::http::StatusCode;
use std::sync::Arc;
use std::time::Duration;

pub async fn show(
    State(node): State<Arc<Node>>,
    Extension(caller): Extension<Arc<Caller>>,
    PathId(id): PathId,
) -> Result<Json<RequestObject>, ApiError> {
    let record = find(&node, &caller, RequestId(id)).await?;
    Ok(Json(RequestObject::of(&record)))
}

/// Asks the request to end and waits a little for it: 200 with its end, or 202 while it is still
/// ending.
pub async fn cancel(
    State(node): State<Arc<Node>>,
    Extension(caller): Extension<Arc<Caller>>,
    PathId(id): PathId,
) -> Result<(StatusCode, Json<RequestObject>), ApiError> {
    let record = cancelled(&node, find(&node, &caller, RequestId(id)).await?).await?;
    let status = if is_live(&record) { StatusCode::ACCEPTED } else { StatusCode::OK };
    Ok((status, Json(RequestObject::of(&record))))
}

/// Cancels a request and returns it as it then is. The operator's surface cancels by the same way.
pub async fn cancelled(node: &Node, record: RequestRecord) -> Result<RequestRecord, ApiError> {
    if !is_live(&record) {
        return Ok(record);
    }
    let key = record.key;
    let flagged = match node.store.submit(Command::RequestCancel { key }).await? {
        Outcome::Request(record) | Outcome::AlreadyResolved(record) => record,
        _ => reread(node, &key).await?,
    };
    if let Some(live) = node.hub.get(&key).filter(|_| is_live(&flagged)) {
        live.ask_to_end(Ending::Cancelled);
        let wait = Duration::from_millis(node.config.requests.cancel_wait_milliseconds);
        // Running out of time is an answer, too: the record says that the request is still ending.
        let _ = tokio::time::timeout(wait, live.ended()).await;
    }
    reread(node, &key).await
}

/// An application sees its own requests; an account key all of the account's, its own first, then
/// the newest.
async fn find(node: &Node, caller: &Caller, id: RequestId) -> Result<RequestRecord, ApiError> {
    let snapshot = node.store.read().await?;
    let own = snapshot.request(&caller.key(id)).await?;
    if own.is_some() || caller.credential.application.is_some() {
        return own.ok_or(ApiError::RequestNotFound);
    }
    let all = snapshot.requests_by_id(caller.account.id, id).await?;
    all.into_iter().max_by_key(|record| record.latest().created_at).ok_or(ApiError::RequestNotFound)
}

async fn reread(node: &Node, key: &RequestKey) -> Result<RequestRecord, ApiError> {
    node.store.read().await?.request(key).await?.ok_or(ApiError::RequestNotFound)
}

fn is_live(record: &RequestRecord) -> bool {
    matches!(record.latest().state, AttemptState::Queued | AttemptState::Running)
}

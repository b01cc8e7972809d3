//! `GET` and `DELETE /v1/requests/{id}`: shows a request, and cancels it.

use crate::ids::RequestId;
use crate::ledger::RequestRecord;
use crate::request::{self, Caller, Services};
use crate::server::error::ApiError;
use crate::server::wire::objects::RequestObject;
use crate::server::wire::query::PathId;
use axum::Json;
use axum::extract::{Extension, State};
use axum::http::StatusCode;
use std::sync::Arc;

pub async fn show(
    State(services): State<Arc<Services>>,
    Extension(caller): Extension<Arc<Caller>>,
    PathId(id): PathId,
) -> Result<Json<RequestObject>, ApiError> {
    let record = find(&services, &caller, RequestId(id)).await?;
    Ok(Json(RequestObject::of(&record)))
}

/// Asks the request to end and waits a little for it: 200 with its end, or 202 while it is still
/// ending.
pub async fn cancel(
    State(services): State<Arc<Services>>,
    Extension(caller): Extension<Arc<Caller>>,
    PathId(id): PathId,
) -> Result<(StatusCode, Json<RequestObject>), ApiError> {
    let record = request::cancel(&services, find(&services, &caller, RequestId(id)).await?).await?;
    let ended = record.latest().state.is_terminal();
    let status = if ended { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Json(RequestObject::of(&record))))
}

/// An application sees its own requests; an account key sees all of the account's, its own first,
/// then the newest.
async fn find(
    services: &Services,
    caller: &Caller,
    id: RequestId,
) -> Result<RequestRecord, ApiError> {
    let snapshot = services.store.read().await?;
    let own = snapshot.request(&caller.key(id)).await?;
    if own.is_some() || caller.credential.application.is_some() {
        return own.ok_or(ApiError::RequestNotFound);
    }
    let all = snapshot.requests_by_id(caller.account.id, id).await?;
    all.into_iter().max_by_key(|record| record.latest().created_at).ok_or(ApiError::RequestNotFound)
}

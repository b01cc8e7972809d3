//! `GET` and `DELETE /v1/requests/{id}`: shows a request, and cancels it; `GET …/receipt` shows the
//! receipt of one that completed.

use crate::access_log::AccessLine;
use crate::error::{ApiError, NOT_COMPLETED, NOT_QUALIFIED};
use crate::forward::Onward;
use crate::wire::query::PathId;
use axum::Json;
use axum::extract::{Extension, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use cresset_base::RequestId;
use cresset_catalogue::Catalogue;
use cresset_ledger::{AttemptState, ReceiptFacts, RequestRecord};
use cresset_request::{Caller, ReceiptStatement, RequestObject, Services};
use std::sync::Arc;
use tokio::task::spawn_blocking;

pub async fn show(
    State(services): State<Arc<Services>>,
    Extension(caller): Extension<Arc<Caller>>,
    PathId(id): PathId,
) -> Result<Json<RequestObject>, ApiError> {
    let record = find(&services, &caller, RequestId(id)).await?;
    Ok(Json(RequestObject::of(&record)))
}

/// Asks the request to end and waits a little for it: 200 with its end, or 202 while it is still
/// ending. One that another node runs is ended there; while that node cannot be reached, it is
/// marked, and ends when its node sees that.
pub async fn cancel(
    State(services): State<Arc<Services>>,
    Extension(caller): Extension<Arc<Caller>>,
    Extension(line): Extension<Arc<AccessLine>>,
    PathId(id): PathId,
    Onward(onward): Onward,
    head: Parts,
) -> Result<Response, ApiError> {
    let record =
        cresset_request::cancel(&services, find(&services, &caller, RequestId(id)).await?).await?;
    let ended = record.latest().state.is_terminal();
    if let Some(forwarder) = onward.filter(|_| !ended) {
        let nodes = cresset_request::owner(&services, &record).await?;
        if let Some(answer) = forwarder.send(&nodes, &head, &Bytes::new(), &line).await {
            return Ok(answer);
        }
    }
    let status = if ended { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Json(RequestObject::of(&record))).into_response())
}

/// The receipt is signed when it is asked for. All that it tells was stored with the answer, so it
/// is the same each time under one key, and goes when the answer does.
pub async fn receipt(
    State(services): State<Arc<Services>>,
    Extension(caller): Extension<Arc<Caller>>,
    PathId(id): PathId,
) -> Result<Response, ApiError> {
    let record = find(&services, &caller, RequestId(id)).await?;
    match record.latest().state {
        AttemptState::Queued | AttemptState::Running => return Err(ApiError::RequestInProgress),
        AttemptState::Cancelled | AttemptState::Failed => {
            return Err(ApiError::NoReceipt { why: NOT_COMPLETED });
        }
        AttemptState::Completed => {}
    }
    let stored = services.store.stored_body(&record.key).await?;
    let facts = stored.ok_or(ApiError::RequestResultExpired)?.receipt;
    let facts = facts.ok_or(ApiError::NoReceipt { why: NOT_QUALIFIED })?;
    let catalogue = services.catalogue.clone();
    let signing = spawn_blocking(move || signed(&catalogue, &record, &facts));
    let signed = signing.await.unwrap_or_else(|error| Err(error.to_string()));
    let sealed = signed.map_err(|error| {
        tracing::error!(%error, request_id = %id, "a receipt could not be signed");
        ApiError::ControlPlaneUnavailable
    })?;
    Ok(([(header::CONTENT_TYPE, "application/json")], sealed).into_response())
}

/// The receipt of a completed request, signed with the present key. It reads files.
fn signed(
    catalogue: &Catalogue,
    record: &RequestRecord,
    facts: &ReceiptFacts,
) -> Result<Vec<u8>, String> {
    let signer = catalogue.receipt_signer().map_err(|error| error.to_string())?;
    let statement = ReceiptStatement::of(record, facts, signer.key());
    Ok(signer.seal(&statement.ok_or("it completed without a usage")?))
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

//! `GET /v1/credits`: the account's balances.

use crate::request::services::Node;
use crate::server::auth::Caller;
use crate::server::error::ApiError;
use crate::server::wire::Json;
use crate::server::wire::objects::CreditBalance;
use axum::extract::{Extension, State};
use std::sync::Arc;

pub async fn show(
    State(node): State<Arc<Node>>,
    Extension(caller): Extension<Arc<Caller>>,
) -> Result<Json<CreditBalance>, ApiError> {
    let balances = node.store.read().await?.balances(caller.account.id).await?;
    CreditBalance::of(&balances).map(Json).ok_or(ApiError::ControlPlaneUnavailable)
}

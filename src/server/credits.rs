//! `GET /v1/credits`: the account's balances.

use super::auth::Caller;
use super::error::ApiError;
use super::node::Node;
use super::wire::Json;
use super::wire::objects::CreditBalance;
use axum::extract::{Extension, State};
use std::sync::Arc;

pub async fn show(
    State(node): State<Arc<Node>>,
    Extension(caller): Extension<Arc<Caller>>,
) -> Result<Json<CreditBalance>, ApiError> {
    if !node.store.trusted() {
        return Err(ApiError::ControlPlaneUnavailable);
    }
    let balances = node.store.read()?.balances(caller.account.id)?;
    CreditBalance::of(&balances).map(Json).ok_or(ApiError::ControlPlaneUnavailable)
}

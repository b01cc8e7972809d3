//! `GET /v1/credits`: the account's balances.

use crate::error::ApiError;
use axum::Json;
use axum::extract::{Extension, State};
use cresset_request::{Caller, CreditBalance, Services};
use std::sync::Arc;

pub async fn show(
    State(services): State<Arc<Services>>,
    Extension(caller): Extension<Arc<Caller>>,
) -> Result<Json<CreditBalance>, ApiError> {
    let balances = services.store.read().await?.balances(caller.account.id).await?;
    CreditBalance::of(&balances).map(Json).ok_or(ApiError::ControlPlaneUnavailable)
}

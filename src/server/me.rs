//! `GET /v1/me`: who the credential belongs to.

use super::auth::Caller;
use super::wire::Json;
use super::wire::objects::Me;
use axum::extract::Extension;
use std::sync::Arc;

pub async fn show(Extension(caller): Extension<Arc<Caller>>) -> Json<Me> {
    Json(Me::of(&caller.account, &caller.credential))
}

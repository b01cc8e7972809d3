//! `GET /v1/me`: the account and the scope of the credential.

use crate::wire::objects::Me;
use axum::Json;
use axum::extract::Extension;
use cresset_request::Caller;
use std::sync::Arc;

pub async fn show(Extension(caller): Extension<Arc<Caller>>) -> Json<Me> {
    Json(Me::of(&caller.account, &caller.credential))
}

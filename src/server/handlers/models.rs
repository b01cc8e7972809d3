//! `GET /v1/models` and `GET /v1/models/{id}`: what the account can use now, whether it is loaded
//! or not.

use crate::ids::ModelId;
use crate::request::services::Node;
use crate::server::auth::Caller;
use crate::server::error::ApiError;
use crate::server::wire::Json;
use crate::server::wire::objects::{Model, ModelPage};
use crate::server::wire::query::{Page, PathId};
use axum::extract::{Extension, State};
use std::sync::Arc;

pub async fn list(
    State(node): State<Arc<Node>>,
    Extension(caller): Extension<Arc<Caller>>,
    page: Page,
) -> Json<ModelPage> {
    let plan = node.config.plan(&caller.account.plan);
    let models = node.models_of(plan).iter().map(|model| Model::of(model, plan)).collect();
    Json(ModelPage::cut(models, page))
}

pub async fn show(
    State(node): State<Arc<Node>>,
    Extension(caller): Extension<Arc<Caller>>,
    PathId(id): PathId,
) -> Result<Json<Model>, ApiError> {
    let plan = node.config.plan(&caller.account.plan);
    let models = node.models_of(plan);
    let model = models
        .iter()
        .find(|model| model.qualified.id() == ModelId(id))
        .ok_or(ApiError::ModelNotFound)?;
    Ok(Json(Model::of(model, plan)))
}

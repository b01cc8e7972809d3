//! `GET /v1/models` and `GET /v1/models/{id}`: the models that the account can use now, loaded or
//! not.

use crate::error::ApiError;
use crate::wire::objects::{ModelObject, ModelPage};
use crate::wire::query::{Page, PathId};
use axum::Json;
use axum::extract::{Extension, State};
use cresset_base::ModelId;
use cresset_request::{Caller, Services};
use std::sync::Arc;

pub async fn list(
    State(services): State<Arc<Services>>,
    Extension(caller): Extension<Arc<Caller>>,
    page: Page,
) -> Json<ModelPage> {
    let plan = &services.plans.of(&caller.account).limits;
    let models =
        services.models_of(plan).iter().map(|model| ModelObject::of(model, plan)).collect();
    Json(ModelPage::cut(models, page))
}

pub async fn show(
    State(services): State<Arc<Services>>,
    Extension(caller): Extension<Arc<Caller>>,
    PathId(id): PathId,
) -> Result<Json<ModelObject>, ApiError> {
    let plan = &services.plans.of(&caller.account).limits;
    let models = services.models_of(plan);
    let model = models
        .iter()
        .find(|model| model.qualified.id() == ModelId(id))
        .ok_or(ApiError::ModelNotFound)?;
    Ok(Json(ModelObject::of(model, plan)))
}

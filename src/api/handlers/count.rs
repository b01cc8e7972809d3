//! How many tokens the prompt of a chat request has. `/v1` has no such request: the node's own
//! gateway asks in this process.

use super::chat;
use crate::Api;
use crate::access_log::AccessLine;
use crate::error::ApiError;
use crate::headers;
use crate::wire::json::JsonTree;
use crate::wire::token_count::TokenCount;
use axum::Json;
use axum::extract::{Extension, Request, State};
use cresset_request::{Caller, count_prompt};
use std::sync::Arc;

/// Takes the body of a chat request. Its checks and their order are those of `chat::create`.
pub async fn count(
    State(Api { services, settings }): State<Api>,
    Extension(caller): Extension<Arc<Caller>>,
    Extension(line): Extension<Arc<AccessLine>>,
    request: Request,
) -> Result<Json<TokenCount>, ApiError> {
    headers::refuse_cache_namespaces(request.headers())?;
    let plan = chat::count_request(&services, &caller)?;
    let (head, body) = request.into_parts();
    let (tree, _) = JsonTree::read(&settings.http, &head.headers, body).await?;
    let input = chat::read(&services, &plan.limits, &settings.leeway, &tree)?.input;
    line.model(input.model);
    let prompt_tokens = count_prompt(&services, &plan.limits, input).await?;
    Ok(Json(TokenCount { prompt_tokens }))
}

//! The prompt that a chat request has: how many tokens, which ones, and its text. `/v1` has no such
//! requests: the node's own gateway asks in this process.

use super::chat;
use crate::Api;
use crate::access_log::AccessLine;
use crate::error::ApiError;
use crate::headers;
use crate::wire::json::JsonTree;
use crate::wire::prompt_facts::{PromptText, PromptTokens, TokenCount};
use crate::wire::raw_prompt;
use axum::Json;
use axum::extract::{FromRequest, Request};
use cresset_request::{Caller, GenerationInput, PlanInForce, Services, TokenLimits, read_prompt};
use std::sync::Arc;

/// A request whose body is that of a chat request. Its checks and their order are those of
/// `chat::create`.
pub struct AskedPrompt {
    services: Arc<Services>,
    plan: Arc<PlanInForce>,
    input: GenerationInput,
    /// Tokens that an answer may list.
    most_tokens: usize,
}

impl FromRequest<Api> for AskedPrompt {
    type Rejection = ApiError;

    async fn from_request(request: Request, api: &Api) -> Result<Self, ApiError> {
        let Api { services, settings } = api.clone();
        headers::refuse_cache_namespaces(request.headers())?;
        let (head, body) = request.into_parts();
        let unguarded = || ApiError::ControlPlaneUnavailable;
        let caller = head.extensions.get::<Arc<Caller>>().ok_or_else(unguarded)?;
        let plan = chat::count_request(&services, caller)?;
        let (tree, _) = JsonTree::read(&settings.http, &head.headers, body).await?;
        let input = chat::read(&services, &plan.limits, &settings.leeway, &tree)?.input;
        if let Some(line) = head.extensions.get::<Arc<AccessLine>>() {
            line.model(input.model);
        }
        let most_tokens = raw_prompt::bound(&settings.leeway.bounds, raw_prompt::TOKEN_IDS);
        Ok(Self { services, plan, input, most_tokens })
    }
}

pub async fn count(asked: AskedPrompt) -> Result<Json<TokenCount>, ApiError> {
    let AskedPrompt { services, plan, input, .. } = asked;
    let read = read_prompt(&services, &plan.limits, input, GenerationInput::prompt);
    let (_, tokens) = read.await?;
    Ok(Json(TokenCount { prompt_tokens: tokens.len() }))
}

pub async fn tokens(asked: AskedPrompt) -> Result<Json<PromptTokens>, ApiError> {
    let AskedPrompt { services, plan, input, most_tokens } = asked;
    let read = read_prompt(&services, &plan.limits, input, GenerationInput::prompt);
    let (model, tokens) = read.await?;
    if tokens.len() > most_tokens {
        let why = format!(
            "The prompt has {} tokens, and at most {most_tokens} are told \
             (gateway.max_token_ids): send it in parts.",
            tokens.len()
        );
        return Err(ApiError::invalid("prompt", why));
    }
    let bytes = |id: &u32| model.text.tokenizer.token_bytes(*id, false).into();
    let pieces = tokens.iter().map(bytes).collect();
    let context_tokens = TokenLimits::of(&model, &plan.limits).context;
    Ok(Json(PromptTokens { tokens, pieces, context_tokens }))
}

pub async fn text(asked: AskedPrompt) -> Result<Json<PromptText>, ApiError> {
    let AskedPrompt { services, plan, input, .. } = asked;
    let read = read_prompt(&services, &plan.limits, input, GenerationInput::prompt_text);
    let (_, text) = read.await?;
    Ok(Json(PromptText { text }))
}

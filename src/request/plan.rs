//! From a well-formed request to a job: the model, its limits, the exact prompt.

#![expect(clippy::disallowed_methods, reason = "a request has a deadline from now on")]

use super::lifecycle::Job;
use super::live::LiveRequest;
use super::services::Node;
use crate::config::Plan;
use crate::engine::GenerateRequest;
use crate::ids::AttemptId;
use crate::ledger::Admit;
use crate::pool::ServedModel;
use crate::server::error::ApiError;
use crate::server::handlers::chat::Call;
use crate::server::wire::chat_request::{ChatRequest, DEFAULT_MAX_TOKENS};
use crate::server::wire::objects::ModelLimits;
use crate::text;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub async fn prepare(node: &Node, call: &Call) -> Result<Job, ApiError> {
    if node.is_draining() {
        return Err(ApiError::Draining);
    }
    let plan = node.config.plan(&call.caller.account.plan);
    let model =
        call.request.model.and_then(|id| node.model_of(plan, id)).ok_or(ApiError::ModelNotFound)?;
    let limits = ModelLimits::of(&model, plan);
    check_output(&call.request, &limits)?;
    check_logit_bias(&call.request, &model)?;
    let prompt = encode(&model, &call.request).await?;
    let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let max_tokens = output_tokens(call.request.max_tokens, prompt_tokens, &limits)?;
    if call.request.min_tokens > max_tokens {
        return Err(ApiError::invalid(
            "min_tokens",
            format!("min_tokens must not be above the {max_tokens} output tokens."),
        ));
    }
    let admit = Admit {
        key: call.key,
        credential: call.caller.credential.id,
        attempt: AttemptId::generate(),
        boot: node.store.boot(),
        fingerprint: call.fingerprint,
        session: call.session,
        model: model.qualified.id(),
        stream: call.request.stream,
        prompt_tokens,
        max_output_tokens: max_tokens,
        prices: model.qualified.prices(),
        max_concurrent: plan.max_concurrent,
    };
    let generate = generate(node, call, &model, plan, prompt, max_tokens)?;
    let live = LiveRequest::new(call.key, call.fingerprint, admit.credential, call.request.stream);
    let (stop, include_usage) = (call.request.stop.clone(), call.request.include_usage);
    let expires_at = call.caller.credential.expires_at;
    Ok(Job { live: Arc::new(live), model, admit, generate, stop, include_usage, expires_at })
}

fn generate(
    node: &Node,
    call: &Call,
    model: &ServedModel,
    plan: &Plan,
    prompt: Arc<Vec<u32>>,
    max_tokens: u32,
) -> Result<GenerateRequest, ApiError> {
    let request = &call.request;
    let eos_ids: &[u32] = if request.ignore_eos { &[] } else { &model.text.eos_ids };
    let fresh_seed = getrandom::u64().map_err(|_| ApiError::GenerationFailed)?;
    Ok(GenerateRequest {
        account: call.key.account,
        priority: plan.priority,
        prompt,
        sampling: request.sampling.resolve(&model.qualified.manifest().generation, fresh_seed),
        max_tokens,
        min_tokens: request.min_tokens,
        eos_ids: eos_ids.into(),
        deadline: Some(Instant::now() + Duration::from_secs(node.config.requests.deadline_seconds)),
    })
}

fn check_output(request: &ChatRequest, limits: &ModelLimits) -> Result<(), ApiError> {
    let most = limits.max_output_tokens;
    match request.max_tokens {
        Some(asked) if asked > most => Err(ApiError::invalid(
            "max_tokens",
            format!("max_tokens must be at most {most} for this model and account."),
        )),
        _ => Ok(()),
    }
}

fn check_logit_bias(request: &ChatRequest, model: &ServedModel) -> Result<(), ApiError> {
    let vocabulary = model.text.tokenizer.vocab_size();
    if request.sampling.logit_bias.iter().all(|(id, _)| (*id as usize) < vocabulary) {
        return Ok(());
    }
    Err(ApiError::invalid(
        "logit_bias",
        format!("logit_bias has a token id that is not below {vocabulary}."),
    ))
}

/// Long conversations take milliseconds to tokenise, so none does it on a thread that serves
/// connections.
async fn encode(model: &ServedModel, request: &ChatRequest) -> Result<Arc<Vec<u32>>, ApiError> {
    let (text, messages) = (model.text.clone(), request.messages.clone());
    let encoded = tokio::task::spawn_blocking(move || text.encode_chat(&messages)).await;
    match encoded {
        Ok(Ok(prompt)) => Ok(Arc::new(prompt)),
        Ok(Err(error @ text::Error::TemplateRefused(_))) => {
            Err(ApiError::invalid("messages", error.to_string()))
        }
        Ok(Err(error)) => Err(failed(&error)),
        Err(panicked) => Err(failed(&panicked)),
    }
}

fn failed(error: &impl std::fmt::Display) -> ApiError {
    tracing::error!(%error, "a prompt could not be encoded");
    ApiError::GenerationFailed
}

/// Output tokens to reserve: what was asked for, or the default lowered to what is left.
fn output_tokens(asked: Option<u32>, prompt: u32, limits: &ModelLimits) -> Result<u32, ApiError> {
    let room = limits.context_tokens.saturating_sub(prompt);
    let wanted = asked.unwrap_or(DEFAULT_MAX_TOKENS.min(limits.max_output_tokens).min(room.max(1)));
    if wanted > room {
        return Err(ApiError::ContextLengthExceeded {
            limit: limits.context_tokens,
            prompt,
            output: wanted,
        });
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_fits_the_context() {
        let limits = ModelLimits {
            model_context_tokens: 1000,
            qualified_context_tokens: 1000,
            plan_context_tokens: 1000,
            context_tokens: 1000,
            max_output_tokens: 600,
        };
        let check = |asked, prompt, expect: Option<u32>| {
            assert_eq!(
                output_tokens(asked, prompt, &limits).ok(),
                expect,
                "{asked:?} after {prompt}"
            );
        };
        check(Some(600), 400, Some(600));
        check(Some(600), 401, None);
        check(Some(1), 999, Some(1));
        check(Some(1), 1000, None);
        check(None, 100, Some(512));
        check(None, 900, Some(100));
        check(None, 999, Some(1));
        check(None, 1000, None);
        check(None, 5000, None);
    }
}

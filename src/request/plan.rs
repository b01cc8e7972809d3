//! Checks an incoming request against its model and plans its run: the exact prompt, the tokens to
//! reserve, the parameters of the generation.

#![expect(clippy::disallowed_methods, reason = "a request has a deadline from now on")]

use super::complete_answer::CompleteAnswer;
use super::error::RequestError;
use super::generation_input::GenerationInput;
use super::live::LiveRequest;
use super::plans::{PlanInForce, allows};
use super::services::Services;
use super::tools::{Capability, PreparedAnswer};
use crate::settings::Plan;
use bytes::Bytes;
use cresset_base::{AttemptId, RequestId, SessionId, UnixMillis};
use cresset_engine::{
    GenerateRequest, NumberField, SAMPLING_NUMBERS, SamplingNumber, SamplingParams,
};
use cresset_ledger::{
    Account, AdmissionRate, Admit, AskedGeneration, Credential, RequestKey, SamplingValue,
    Sha256Bytes,
};
use cresset_pool::ServedModel;
use cresset_telemetry::traces::TraceSpan;
use cresset_text::{AnswerReader, RawPrompt, TextModel, Unwanted};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Output tokens if the client names no limit, lowered to what limits and context allow.
const DEFAULT_MAX_TOKENS: u32 = 512;

// What an answer takes where it is stored, bytes, rounded up from what was measured: 700 for an
// answer without text and 500 for its receipt, 4 for a token of text, and 14 for each token whose
// log-probability is told.
const ANSWER_BYTES: u64 = 1_536;
const TOKEN_BYTES: u64 = 8;
const CANDIDATE_BYTES: u64 = 24;

/// A verified credential and its account.
#[derive(Clone, Debug)]
pub struct Caller {
    pub account: Account,
    pub credential: Credential,
}

impl Caller {
    /// The key of this caller's request with the given id.
    pub fn key(&self, request: RequestId) -> RequestKey {
        RequestKey { account: self.account.id, application: self.credential.application, request }
    }
}

/// A well-formed request, not yet looked up.
#[derive(Debug)]
pub struct IncomingRequest {
    pub caller: Arc<Caller>,
    /// The plan of the caller's account when the request arrived.
    pub plan: Arc<PlanInForce>,
    pub key: RequestKey,
    pub session: SessionId,
    pub fingerprint: [u8; 32],
    pub input: GenerationInput,
    /// How long a stream goes on after its client has left; `None` is the time of the settings.
    pub disconnect_grace: Option<Duration>,
    /// Renders the body that is stored and sent when the answer is complete.
    pub render: fn(&CompleteAnswer) -> Bytes,
    /// The span of the HTTP request.
    pub trace: TraceSpan,
    /// Whether another node of a shared ledger may answer it.
    pub may_go_elsewhere: bool,
}

/// Everything that the lifecycle needs to run a request.
pub(super) struct RequestPlan {
    pub live: Arc<LiveRequest>,
    pub model: Arc<ServedModel>,
    pub admit: Admit,
    pub account_plan: Arc<PlanInForce>,
    pub generate: GenerateRequest,
    /// For the receipt.
    pub asked: AskedGeneration,
    pub stop: Vec<String>,
    pub reader: AnswerReader,
    pub render: fn(&CompleteAnswer) -> Bytes,
    /// The request stops when its credential expires, as if the credential had been revoked.
    pub expires_at: Option<UnixMillis>,
}

/// The longest prompt and output that a plan allows a model, all in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLimits {
    /// The model's own context.
    pub model_context: u32,
    /// The context that was qualified, or the shorter one that the configuration serves.
    pub qualified_context: u32,
    pub plan_context: u32,
    /// The lowest of the three.
    pub context: u32,
    pub max_output: u32,
}

impl TokenLimits {
    pub fn of(model: &ServedModel, plan: &Plan) -> Self {
        let limits = model.qualified.manifest().limits;
        let served = u32::try_from(model.max_context).unwrap_or(u32::MAX);
        let qualified = model.qualified.qualified_context_tokens().min(served);
        Self::lowest(limits.model_context_tokens, qualified, plan, limits.max_output_tokens)
    }

    fn lowest(model: u32, qualified: u32, plan: &Plan, max_output: u32) -> Self {
        let plan_context = plan.context_tokens.unwrap_or(model);
        let context = model.min(qualified).min(plan_context);
        let plan_output = plan.max_output_tokens.unwrap_or(max_output);
        Self {
            model_context: model,
            qualified_context: qualified,
            plan_context,
            context,
            max_output: max_output.min(plan_output).min(context),
        }
    }
}

/// The model that a request asks for, and its prompt as `read` makes it. Nothing is reserved, runs
/// or is charged.
pub async fn read_prompt<T: Send + 'static>(
    services: &Services,
    plan: &Plan,
    input: GenerationInput,
    read: fn(&GenerationInput, &TextModel, &Unwanted) -> Result<T, RequestError>,
) -> Result<(Arc<ServedModel>, T), RequestError> {
    let model = asked_model(services, plan, &input)?;
    input.check_capabilities(&model, plan)?;
    let text = model.text.clone();
    let read = move |unwanted: &Unwanted| read(&input, &text, unwanted);
    Ok((model, in_background(deadline(services), read).await?))
}

/// The model that a request asks for, if it may use it and the model can read its prompt.
fn asked_model(
    services: &Services,
    plan: &Plan,
    input: &GenerationInput,
) -> Result<Arc<ServedModel>, RequestError> {
    if services.is_draining() {
        return Err(RequestError::Draining);
    }
    let model = input.model.and_then(|id| services.pool.offered(id));
    let model = model.filter(|model| allows(plan, model)).ok_or(RequestError::ModelNotFound)?;
    let vocabulary = model.text.tokenizer.vocab_size();
    match &input.raw {
        Some(RawPrompt::FillIn { .. }) if !model.text.fills_in() => {
            Err(RequestError::refused("suffix", not_filled_in(services, plan, &model)))
        }
        Some(RawPrompt::Tokens(ids)) if ids.iter().any(|id| *id as usize >= vocabulary) => {
            let why = format!("must have token ids of this model, which are below {vocabulary}");
            Err(RequestError::refused("prompt", why))
        }
        _ => Ok(model),
    }
}

/// Why a model fills in no text, and which others do.
fn not_filled_in(services: &Services, plan: &Plan, model: &ServedModel) -> String {
    let models = services.models_of(plan);
    let able = models.iter().filter(|other| other.text.fills_in()).map(|other| name(other));
    told_not_filled_in(name(model), &able.collect::<Vec<_>>().join(", "))
}

fn told_not_filled_in(model: &str, able: &str) -> String {
    let why = format!("is not for {model}, whose vocabulary has no fill-in-the-middle tokens");
    match able {
        "" => format!("{why}; nor has any other model that this key can use: leave it out"),
        able => format!("{why}: ask {able}"),
    }
}

/// The name of a model for clients, as gateways know it.
fn name(model: &ServedModel) -> &str {
    let manifest = model.qualified.manifest();
    manifest.address.as_ref().unwrap_or(&manifest.release_label)
}

fn deadline(services: &Services) -> Instant {
    Instant::now() + Duration::from_secs(services.requests.deadline_seconds)
}

/// The checks are in the order in which clients see their refusals: model, limits, context.
pub(super) async fn prepare(
    services: &Services,
    request: &IncomingRequest,
) -> Result<RequestPlan, RequestError> {
    let IncomingRequest { caller, key, fingerprint, input, .. } = request;
    let plan = &request.plan.limits;
    let model = asked_model(services, plan, input)?;
    let limits = TokenLimits::of(&model, plan);
    if !input.is_lenient && input.max_tokens.is_some_and(|asked| asked > limits.max_output) {
        return Err(RequestError::OutputAboveLimit { limit: limits.max_output });
    }
    let vocabulary = model.text.tokenizer.vocab_size();
    if input.sampling.logit_bias.iter().any(|(id, _)| *id as usize >= vocabulary) {
        return Err(RequestError::UnknownToken { vocabulary });
    }
    input.check_capabilities(&model, plan)?;
    let thinks = Capability::Reasoning.holds(&model, plan);
    let (text, own, deadline) = (model.text.clone(), input.clone(), deadline(services));
    let prepare = move |unwanted: &Unwanted| own.prepare(&text, thinks, unwanted);
    let prepared = in_background(deadline, prepare).await?;
    let prompt_tokens = u32::try_from(prepared.prompt.len()).unwrap_or(u32::MAX);
    let max_tokens = output_tokens(input, prompt_tokens, &limits)?;
    input.check_min_tokens(max_tokens)?;
    let admit = Admit {
        key: *key,
        credential: caller.credential.id,
        attempt: AttemptId::generate(),
        boot: services.store.boot(),
        fingerprint: *fingerprint,
        session: request.session,
        model: model.qualified.id(),
        stream: input.stream,
        prompt_tokens,
        max_output_tokens: max_tokens,
        prices: model.qualified.prices(),
        max_concurrent: plan.max_concurrent,
        quotas: plan.quotas(),
        rate: AdmissionRate { per_minute: plan.requests_per_minute, burst: plan.burst },
        retention_ms: services.requests.replay_ms(),
        crash_block_ms: services.requests.crash_block_ms(),
    };
    let stored = caller.account.stores_answers;
    let bytes = if stored { answer_bytes(max_tokens, input.sampling.logprobs) } else { 0 };
    let credential = admit.credential;
    let generate = generation(request, &model, &prepared, max_tokens, deadline)?;
    let live = LiveRequest::new(*key, *fingerprint, credential, input.stream, bytes);
    let live = live.traced_by(&request.trace).for_prompt(prompt_tokens);
    Ok(RequestPlan {
        live: Arc::new(live),
        asked: asked(&generate, prepared.digest, input.ignore_eos),
        generate,
        model,
        admit,
        account_plan: request.plan.clone(),
        stop: input.stop.clone(),
        reader: prepared.reader,
        render: request.render,
        expires_at: caller.credential.expires_at,
    })
}

/// Bytes that an answer is expected to take at most where it is stored. Only an answer that cannot
/// be compressed, such as one of long random tokens, takes more.
fn answer_bytes(max_tokens: u32, logprobs: Option<u8>) -> u64 {
    let candidates = logprobs.map_or(0, |top| u64::from(top) + 1);
    ANSWER_BYTES + u64::from(max_tokens) * (TOKEN_BYTES + candidates * CANDIDATE_BYTES)
}

fn generation(
    request: &IncomingRequest,
    model: &ServedModel,
    prepared: &PreparedAnswer,
    max_tokens: u32,
    deadline: Instant,
) -> Result<GenerateRequest, RequestError> {
    let input = &request.input;
    let fresh_seed = getrandom::u64().map_err(|_| RequestError::GenerationFailed)?;
    Ok(GenerateRequest {
        account: request.key.account,
        application: request.key.application,
        priority: request.plan.limits.priority,
        background: false,
        prompt: prepared.prompt.clone(),
        sampling: input.sampling.resolve(&model.qualified.manifest().generation, fresh_seed),
        max_tokens,
        min_tokens: input.min_tokens,
        eos_ids: input.ends(&model.text).into(),
        grammar: prepared.grammar.clone(),
        deadline: Some(deadline),
    })
}

/// What a receipt tells of the generation. The prompt's digest is `prompt`.
fn asked(generate: &GenerateRequest, prompt: Sha256Bytes, ignore_eos: bool) -> AskedGeneration {
    let params = &generate.sampling;
    let value = |number: &SamplingNumber| SamplingValue::new(number.name, shown(number, params));
    AskedGeneration {
        prompt,
        seed: params.seed,
        sampling: SAMPLING_NUMBERS.iter().map(value).collect(),
        max_tokens: generate.max_tokens,
        min_tokens: generate.min_tokens,
        ignore_eos,
    }
}

/// The number with the digits that a client would write: 0.7 and not the double next to 0.7 as f32.
fn shown(number: &SamplingNumber, params: &SamplingParams) -> f64 {
    let exact = number.get(params);
    match number.field {
        NumberField::Count(_) => exact,
        _ => (exact as f32).to_string().parse().unwrap_or(exact),
    }
}

/// Encodes a prompt on a thread that serves no connections. It ends early when the caller's future
/// is dropped: its client went away, or the request's time is up.
async fn in_background<T: Send + 'static>(
    deadline: Instant,
    encode: impl FnOnce(&Unwanted) -> Result<T, RequestError> + Send + 'static,
) -> Result<T, RequestError> {
    let unwanted = UnwantedOnDrop(Unwanted::default());
    let seen = unwanted.0.clone();
    let encoding = tokio::task::spawn_blocking(move || encode(&seen));
    let encoded = tokio::time::timeout_at(deadline.into(), encoding).await;
    let encoded = encoded.map_err(|_| RequestError::DeadlineExceeded)?;
    encoded.unwrap_or_else(|panicked| {
        tracing::error!(%panicked, "a prompt could not be encoded");
        Err(RequestError::GenerationFailed)
    })
}

/// Ends the encoding of a prompt when nobody waits for it any more.
struct UnwantedOnDrop(Unwanted);

impl Drop for UnwantedOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Output tokens to reserve: as many as were asked for, or the default lowered to what is left.
fn output_tokens(
    input: &GenerationInput,
    prompt: u32,
    limits: &TokenLimits,
) -> Result<u32, RequestError> {
    let room = limits.context.saturating_sub(prompt);
    let left = |wanted: u32| wanted.min(limits.max_output).min(room.max(1));
    let asked = input.max_tokens.filter(|_| !input.is_lenient);
    let output = asked.unwrap_or_else(|| left(input.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS)));
    if output > room {
        let (limit, output) = (limits.context, asked.unwrap_or_default());
        return Err(RequestError::ContextExceeded { limit, prompt, output });
    }
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_fits_the_context() {
        let limits = TokenLimits {
            model_context: 1000,
            qualified_context: 1000,
            plan_context: 1000,
            context: 1000,
            max_output: 600,
        };
        let output = |max_tokens, prompt, is_lenient| {
            let input = GenerationInput { max_tokens, is_lenient, ..GenerationInput::default() };
            output_tokens(&input, prompt, &limits).ok()
        };
        let check = |asked, prompt, expect: Option<u32>| {
            assert_eq!(output(asked, prompt, false), expect, "{asked:?} after {prompt}");
        };
        for (asked, prompt, expect) in [
            (Some(32_000), 100, Some(600)),
            (Some(32_000), 900, Some(100)),
            (Some(50), 900, Some(50)),
            (Some(1), 1_000, None),
            (None, 900, Some(100)),
        ] {
            assert_eq!(output(asked, prompt, true), expect, "{asked:?} after {prompt}, lenient");
        }
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

    #[test]
    fn models_that_fill_in_are_named() {
        for (able, expect) in [("", "leave it out"), ("coder, star", ": ask coder, star")] {
            let told = told_not_filled_in("small", able);
            assert!(told.starts_with("is not for small") && told.ends_with(expect), "{told}");
        }
    }

    #[test]
    fn the_lowest_context_counts() {
        let check = |plan: (Option<u32>, Option<u32>), qualified: u32, expect: (u32, u32, u32)| {
            let plan =
                Plan { context_tokens: plan.0, max_output_tokens: plan.1, ..Plan::default() };
            let limits = TokenLimits::lowest(8192, qualified, &plan, 4096);
            assert_eq!((limits.plan_context, limits.context, limits.max_output), expect);
        };
        check((None, None), 8192, (8192, 8192, 4096));
        check((None, None), 2048, (8192, 2048, 2048));
        check((Some(1000), None), 2048, (1000, 1000, 1000));
        check((Some(100_000), Some(10)), 8192, (100_000, 8192, 10));
    }
}

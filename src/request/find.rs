//! Finds or starts the request with an id: callers are attached to it while it runs, get its stored
//! answer once it has completed, and start it if it is new.

use super::elsewhere;
use super::error::{RequestError, SOON};
use super::lifecycle;
use super::live::{Admission, AnswerFigures, LiveRequest, Subscription};
use super::plan::{IncomingRequest, RequestPlan, prepare};
use super::services::Services;
use bytes::Bytes;
use cresset_base::{CredentialId, UnixMillis};
use cresset_ledger::{Refusal, RequestRecord, Seen, admission};
use cresset_store::ListedNode;
use std::sync::Arc;
use std::time::Duration;

/// The source of a request's answer.
pub enum AnswerSource {
    /// The rendered body, now complete.
    Body { body: Bytes, figures: Option<AnswerFigures> },
    /// The deltas from the first one. The request was admitted at `created_at`.
    Stream { created_at: UnixMillis, prompt_tokens: u32, deltas: Subscription },
    /// The body that was stored when the request completed earlier, as a stream or not.
    Stored { body: Bytes, stream: bool },
    /// The first of these nodes that can be reached, and the error if none can.
    Elsewhere { nodes: Vec<ListedNode>, unreachable: RequestError },
}

/// The next step after looking for a request once.
enum Next {
    Answer(AnswerSource),
    /// The request has just started or ended: look again.
    Retry,
    /// The ledger allows the request to run.
    Run,
}

/// Finds the request among the live ones and in the ledger, or starts it.
///
/// Equal requests that arrive together find each other among the live ones: one is admitted and the
/// others join it. When it is refused, each of the others tries again by itself.
pub async fn find_or_start(
    services: &Arc<Services>,
    request: &IncomingRequest,
) -> Result<AnswerSource, RequestError> {
    let mut looked_again = false;
    loop {
        let mut next = match services.live.get(&request.key) {
            Some(live) => join(services, request, &live).await?,
            None => recall(services, request, &mut looked_again).await?,
        };
        if let Next::Run = next {
            next = match prepare(services, request).await {
                Err(RequestError::ModelNotFound) => served_elsewhere(services, request).await?,
                plan => start(services, plan?, request.disconnect_grace).await?,
            };
        }
        if let Next::Answer(found) = next {
            return Ok(found);
        }
    }
}

/// Joins a live request.
async fn join(
    services: &Services,
    request: &IncomingRequest,
    live: &Arc<LiveRequest>,
) -> Result<Next, RequestError> {
    let Admission::Admitted { created_at } = live.admission().await else {
        return Ok(Next::Retry);
    };
    if live.fingerprint != request.fingerprint {
        return Err(Refusal::FingerprintMismatch.into());
    }
    services.metrics.attaches.inc();
    request.trace.link(&live.trace);
    let credential = request.caller.credential.id;
    let subscription = subscribe(services, live, credential, request.disconnect_grace)?;
    follow(live, credential, subscription, created_at).await
}

/// Looks into the ledger.
async fn recall(
    services: &Services,
    request: &IncomingRequest,
    looked_again: &mut bool,
) -> Result<Next, RequestError> {
    let ledger = services.store.read().await?;
    if let Some(record) = ledger.request(&request.key).await? {
        let retention = services.requests.replay_ms();
        let now = services.store.now();
        let seen = admission::judge(&record, &request.fingerprint, now, retention)?;
        if seen != Seen::MayRetry {
            // It may hold one of few connections to a database, and nobody may wait for another
            // one meanwhile.
            drop(ledger);
            return match seen {
                Seen::Cancelled => Err(RequestError::Cancelled),
                Seen::Completed => stored(services, &record).await,
                _ => running(services, request, &record, looked_again).await,
            };
        }
    }
    // Admission checks this, too. By then the engine has the input, and the node may have crashed
    // again.
    let account = request.key.account;
    let crashes = ledger.crashes(account, &request.fingerprint).await?;
    let block = services.requests.crash_block_ms();
    if crashes.is_some_and(|crashes| crashes.are_too_many(services.store.now(), block)) {
        return Err(Refusal::AttemptsExhausted.into());
    }
    Ok(Next::Run)
}

/// The request runs, and was not among the live ones.
async fn running(
    services: &Services,
    request: &IncomingRequest,
    record: &RequestRecord,
    looked_again: &mut bool,
) -> Result<Next, RequestError> {
    // Other nodes take no raw prompts from this one.
    if request.may_go_elsewhere && request.input.raw.is_none() {
        let nodes = elsewhere::owner(services, record).await?;
        if !nodes.is_empty() {
            let unreachable = RequestError::InProgress;
            return Ok(Next::Answer(AnswerSource::Elsewhere { nodes, unreachable }));
        }
    }
    // It became live after the live ones were searched, or has ended since it was read.
    let is_first_look = !std::mem::replace(looked_again, true);
    if is_first_look { Ok(Next::Retry) } else { Err(RequestError::InProgress) }
}

/// The request is a new one, for a model that this node does not serve.
async fn served_elsewhere(
    services: &Services,
    request: &IncomingRequest,
) -> Result<Next, RequestError> {
    let Some(model) = request.input.model.filter(|_| request.may_go_elsewhere) else {
        return Err(RequestError::ModelNotFound);
    };
    let nodes = elsewhere::servers(services, model).await?;
    if nodes.is_empty() {
        return Err(RequestError::ModelNotFound);
    }
    if request.input.raw.is_some() {
        let why = "can be had of the node alone that serves the model: ask the gateway there";
        return Err(RequestError::refused("prompt", why));
    }
    let unreachable = RequestError::Overloaded { retry_after: SOON };
    Ok(Next::Answer(AnswerSource::Elsewhere { nodes, unreachable }))
}

async fn stored(services: &Services, record: &RequestRecord) -> Result<Next, RequestError> {
    let body = services.store.body(&record.key).await?.ok_or(Refusal::ResultExpired)?;
    services.metrics.replays.inc();
    Ok(Next::Answer(AnswerSource::Stored { body, stream: record.stream }))
}

/// Makes the request live, unless an equal one was faster, and starts its lifecycle.
async fn start(
    services: &Arc<Services>,
    plan: RequestPlan,
    grace: Option<Duration>,
) -> Result<Next, RequestError> {
    let live = plan.live.clone();
    // The subscription comes before the start, because a stream without listeners counts as
    // abandoned.
    let credential = live.credential;
    let subscription = subscribe(services, &live, credential, grace)?;
    if !services.live.insert(&live) {
        return Ok(Next::Retry);
    }
    services.tasks.spawn(lifecycle::run(services.clone(), plan));
    match live.admission().await {
        Admission::Admitted { created_at } => {
            follow(&live, credential, subscription, created_at).await
        }
        Admission::Superseded => Ok(Next::Retry),
        Admission::Refused(error) => Err(error),
    }
}

/// A listener's subscription to a stream; `None` for an answer in one piece.
fn subscribe(
    services: &Services,
    live: &Arc<LiveRequest>,
    credential: CredentialId,
    grace: Option<Duration>,
) -> Result<Option<Subscription>, RequestError> {
    if !live.stream {
        return Ok(None);
    }
    let limit = services.requests.max_subscribers;
    let mut seat = Subscription::new(live, credential, limit).ok_or(RequestError::InProgress)?;
    seat.grace = grace;
    Ok(Some(seat))
}

async fn follow(
    live: &LiveRequest,
    credential: CredentialId,
    subscription: Option<Subscription>,
    created_at: UnixMillis,
) -> Result<Next, RequestError> {
    let Some(deltas) = subscription else {
        let body = live.ended_for(credential).await?;
        let figures = live.figures.get().copied();
        return Ok(Next::Answer(AnswerSource::Body { body, figures }));
    };
    let prompt_tokens = live.prompt_tokens;
    Ok(Next::Answer(AnswerSource::Stream { created_at, prompt_tokens, deltas }))
}

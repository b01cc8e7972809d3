//! The circuit breaker of a model. One whose requests fail one after the other is withdrawn: no
//! client is sent to it until a request of the pool's own, the canary, has been answered.

use super::{ModelPool, ServedModel};
use cresset_base::{AccountId, ModelId};
use cresset_engine::{EngineError, GenerateRequest, SamplingParams, SequenceEvent, StopCause};
use cresset_text::ChatMessage;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The ends of a model's latest requests.
#[derive(Debug, Default)]
pub(super) struct LatestEnds {
    /// Requests that failed in the engine since the last one that was answered.
    failed: u32,
    pub withdrawn: bool,
}

impl ModelPool {
    /// Notes how the engine ended a request; `cut` tells that its answer was complete by then.
    /// Enough failures in a row withdraw the model.
    pub fn note_end(self: &Arc<Self>, id: ModelId, cause: &StopCause, cut: bool) {
        let answered = if cut { Some(true) } else { was_answered(cause) };
        let Some(answered) = answered else { return };
        let mut state = self.state.lock();
        let ends = &mut state.entry(id).ends;
        if answered {
            *ends = LatestEnds::default();
            return;
        }
        ends.failed = ends.failed.saturating_add(1);
        if ends.failed >= self.settings.withdraw_after_failures && !ends.withdrawn {
            ends.withdrawn = true;
            let (name, failed) = (state.name_of(id), self.settings.withdraw_after_failures);
            tracing::error!(%name, failed, "a model is withdrawn: all its latest requests failed");
            self.runtime.spawn(watch(Arc::downgrade(self), id, self.canary_pause()));
        }
    }

    /// Between two canaries of a withdrawn model, and the longest that one may take.
    pub(super) fn canary_pause(&self) -> Duration {
        Duration::from_secs(self.settings.canary_pause_seconds)
    }

    /// Sends one request of a single token through the model's engine. True when it was answered.
    async fn canary_passes(self: &Arc<Self>, model: &ServedModel) -> bool {
        let request = canary(model, self.canary_pause());
        let id = model.qualified.id();
        let Ok((_submitted, mut events)) = self.submit(id, None, request) else { return false };
        while let Some(event) = events.recv().await {
            if let SequenceEvent::Finished(finished) = event {
                return was_answered(&finished.cause) == Some(true);
            }
        }
        false
    }
}

/// Whether the engine answered with this end; `None` of one that says nothing about the model.
fn was_answered(cause: &StopCause) -> Option<bool> {
    match cause {
        StopCause::EndOfText | StopCause::Length => Some(true),
        StopCause::Failed(why) if says_of_the_model(why) => Some(false),
        _ => None,
    }
}

/// Whether a failure tells that the model's engine does not work. One that was ended from outside,
/// or never loaded, tells nothing.
fn says_of_the_model(failure: &EngineError) -> bool {
    match failure {
        EngineError::NotLoaded(_) | EngineError::ShutDown | EngineError::Grammar(_) => false,
        EngineError::Stopped(reason) => says_of_the_model(reason),
        _ => true,
    }
}

/// Tries canaries until one passes. The first goes at once, so that one failed step with many
/// requests in it keeps a sound model away only for a moment.
async fn watch(pool: Weak<ModelPool>, id: ModelId, pause: Duration) {
    loop {
        let Some(pool) = pool.upgrade() else { return };
        let model = pool.get(id).expect("invariant: ids come from offered models");
        if pool.canary_passes(&model).await {
            pool.state.lock().entry(id).ends = LatestEnds::default();
            let name = &model.qualified.manifest().name;
            tracing::info!(%name, "a withdrawn model is offered again: it answered");
            return;
        }
        drop(pool);
        tokio::time::sleep(pause).await;
    }
}

#[expect(clippy::disallowed_methods, reason = "a canary that waits for ever tells nothing")]
fn canary(model: &ServedModel, patience: Duration) -> GenerateRequest {
    let question = ChatMessage {
        role: "user".to_owned(),
        content: Some("Hello".to_owned()),
        ..ChatMessage::default()
    };
    // Any token will do where the template asks for more than one message.
    let prompt = model.text.encode_chat(&[question]).unwrap_or_else(|_| vec![0]);
    GenerateRequest {
        account: AccountId(Uuid::nil()),
        application: None,
        priority: u8::MAX,
        background: false,
        prompt: Arc::new(prompt),
        sampling: SamplingParams::default(),
        max_tokens: 1,
        min_tokens: 0,
        eos_ids: Arc::from([]),
        grammar: None,
        deadline: Some(Instant::now() + patience),
    }
}

//! Access to the engines of loaded models: leases, places in a model's queue, submitted requests.

use super::ModelPool;
use super::state::Place;
use crate::engine::{
    EngineError, EngineHandle, Finished, GenerateRequest, SequenceEvent, SequenceId, StopCause,
};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// The right to use a loaded model: the model stays loaded until the lease is dropped.
pub(super) struct EngineLease {
    pub pool: Arc<ModelPool>,
    pub place: Place,
    pub engine: EngineHandle,
}

impl Drop for EngineLease {
    fn drop(&mut self) {
        self.pool.state.lock().eviction(self.place).end_request(self.place.model);
        self.pool.run_actions();
    }
}

/// A place in the queue for a model that is not loaded. Dropping it gives the place up.
pub(super) struct QueueSlot {
    pub pool: Arc<ModelPool>,
    pub place: Place,
    pub granted: oneshot::Receiver<EngineLease>,
}

impl Drop for QueueSlot {
    fn drop(&mut self) {
        self.granted.close();
        self.pool.state.lock().count_waiters(self.place);
        self.pool.run_actions();
    }
}

pub(super) enum EngineAccess {
    Granted(EngineLease),
    Queued(QueueSlot),
}

/// A request in an engine, or waiting for its model to be loaded. Dropping it stops the request.
pub struct SubmittedRequest(SubmittedStage);

enum SubmittedStage {
    Running(EngineLease, SequenceId),
    Queued(CancellationToken),
}

impl SubmittedRequest {
    pub(super) fn running(lease: EngineLease, sequence: SequenceId) -> Self {
        Self(SubmittedStage::Running(lease, sequence))
    }

    /// Submits the request once its model is loaded, on a task of the pool's runtime.
    pub(super) fn queued(
        slot: QueueSlot,
        request: GenerateRequest,
        events: mpsc::Sender<SequenceEvent>,
    ) -> Self {
        let (pool, stop) = (slot.pool.clone(), CancellationToken::new());
        pool.runtime.spawn(start_when_loaded(slot, request, events, stop.clone()));
        Self(SubmittedStage::Queued(stop))
    }

    /// The sequence ends before the next step; its `Finished` event follows.
    pub fn stop(&self) {
        match &self.0 {
            SubmittedStage::Running(lease, sequence) => lease.engine.stop(*sequence),
            SubmittedStage::Queued(stop) => stop.cancel(),
        }
    }
}

impl Drop for SubmittedRequest {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Submits a request once its model is loaded. A request that cannot be submitted gets a
/// `Finished` event with the reason.
async fn start_when_loaded(
    mut slot: QueueSlot,
    request: GenerateRequest,
    events: mpsc::Sender<SequenceEvent>,
    stop: CancellationToken,
) {
    let max_wait = slot.pool.max_wait();
    let cause = tokio::select! {
        biased;
        () = stop.cancelled() => StopCause::Stopped,
        granted = &mut slot.granted => if let Ok(lease) = granted {
            if let Ok(sequence) = lease.engine.submit_to(request, events.clone()) {
                drop(events);
                stop.cancelled().await;
                return lease.engine.stop(sequence);
            }
            StopCause::TurnedAway
        } else {
            let why = "its model could not be loaded";
            StopCause::Failed(EngineError::NotLoaded(why.into()))
        },
        () = tokio::time::sleep(max_wait) => StopCause::TurnedAway,
    };
    let finished = Finished { cause, prompt_tokens: 0, cached_tokens: 0, completion_tokens: 0 };
    // The event is lost only if its reader has gone.
    let _ = events.try_send(SequenceEvent::Finished(finished));
}

//! This gives a request its model, and an engine of it: at once, with a lease that keeps the model
//! loaded, or after a wait in the model's queue until it is loaded.

use super::eviction::PoolAction;
use super::lease::EngineLease;
use super::placement::Place;
use super::state::PoolState;
use super::{ModelPool, ServedModel};
use cresset_base::ModelId;
use cresset_engine::{
    EngineError, Finished, GenerateRequest, Refused, SequenceEvent, SequenceId, StopCause,
};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

impl ModelPool {
    /// The model with this id if requests may name it.
    pub fn offered(&self, id: ModelId) -> Option<Arc<ServedModel>> {
        let state = self.state.lock();
        let entry = state.entries.get(&id).filter(|entry| entry.withheld.is_none());
        entry.map(|entry| entry.model.clone())
    }

    /// Submits a request to an engine of its model, or queues it until the model is loaded. Never
    /// blocks. The channel holds every event of the sequence, so the engine never waits for a slow
    /// reader. A refusal is `Overloaded` also where the model's queue is full, where the model is
    /// withdrawn, or where a load or its engine failed within `RELOAD_PAUSE`. `session` is `None`
    /// for a canary alone, which a withdrawn model takes as well.
    pub fn submit(
        self: &Arc<Self>,
        id: ModelId,
        session: Option<Uuid>,
        request: GenerateRequest,
    ) -> Result<(SubmittedRequest, mpsc::Receiver<SequenceEvent>), Refused> {
        let (events, receiver) = mpsc::channel(request.event_capacity());
        let stage = match self.acquire(id, session)? {
            EngineAccess::Granted(lease) => {
                let sequence = lease.engine.submit_to(request, events)?;
                SubmittedStage::Running(lease, sequence)
            }
            EngineAccess::Queued(slot) => {
                let stop = CancellationToken::new();
                self.runtime.spawn(start_when_loaded(slot, request, events, stop.clone()));
                self.run_actions();
                SubmittedStage::Queued(stop)
            }
        };
        Ok((SubmittedRequest(stage), receiver))
    }

    /// An engine of the model, or a place in the queue for one. After a place was given, the caller
    /// calls `run_actions`, which begins the load.
    fn acquire(
        self: &Arc<Self>,
        id: ModelId,
        session: Option<Uuid>,
    ) -> Result<EngineAccess, Refused> {
        let mut state = self.state.lock();
        let is_withdrawn = state.entries.get(&id).is_some_and(|entry| entry.ends.withdrawn);
        if is_withdrawn && session.is_some() {
            return Err(Refused::Overloaded { retry_after: self.canary_pause() });
        }
        self.mark_dead(&mut state, id);
        let placement = state.place(id, session.unwrap_or_default(), self.canary_pause())?;
        if let Some(device) = placement.also_load {
            let pool = self.clone();
            // The load logs its failure.
            self.runtime.spawn(async move { pool.preload_at(Place { device, model: id }).await });
        }
        let place = Place { device: placement.device, model: id };
        self.acquire_at(&mut state, place, self.settings.max_waiting)
    }

    /// The model's engine on one device, or a place in its queue unless `max_waiting` wait there.
    pub(super) fn acquire_at(
        self: &Arc<Self>,
        state: &mut PoolState,
        place: Place,
        max_waiting: usize,
    ) -> Result<EngineAccess, Refused> {
        let replica = state.replica(place);
        if let Some(retry_after) = replica.reload_pause() {
            return Err(Refused::Overloaded { retry_after });
        }
        if let Some(engine) = replica.engine.clone()
            && state.eviction(place).begin_request(place.model)
        {
            return Ok(EngineAccess::Granted(EngineLease { pool: self.clone(), place, engine }));
        }
        let replica = state.replica(place);
        if replica.waiters.len() >= max_waiting {
            return Err(Refused::Overloaded { retry_after: self.max_wait() });
        }
        let (waiter, granted) = oneshot::channel();
        replica.waiters.push(waiter);
        state.count_waiters(place);
        Ok(EngineAccess::Queued(QueueSlot { pool: self.clone(), place, granted }))
    }

    /// Does what `eviction` decides: grants leases, begins loads and unloads. To be called after
    /// every change that may lead to a decision.
    pub(super) fn run_actions(self: &Arc<Self>) {
        let mut granted = Vec::new();
        let mut state = self.state.lock();
        while let Some((device, action)) = state.next_action() {
            let at = |model| Place { device, model };
            match action {
                PoolAction::Grant(id) => granted.extend(state.grant_waiting(self, at(id))),
                PoolAction::Load(id) => self.clone().load(at(id), state.entry(id).model.clone()),
                PoolAction::Unload(id) => {
                    let engine = state.replica(at(id)).engine.take();
                    self.clone().unload(at(id), engine);
                }
            }
        }
        drop(state);
        for (waiter, lease) in granted {
            // If the waiter has gone meanwhile, the lease is returned here and dropped.
            let _ = waiter.send(lease);
        }
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

//! The models that this node serves, loaded or not: hands requests to engines, loads and unloads as
//! `residency` decides.
//!
//! Loading runs on threads that may block, so no stream ever waits for another model's load. A
//! request for a model that is not loaded waits for it, within the configured patience; its stream
//! is kept alive meanwhile as in any queue.

pub mod residency;

use self::residency::{Action, Phase, Residency, Resident};
use crate::catalogue::QualifiedModel;
use crate::config::EngineSettings;
use crate::engine::{
    EngineError, EngineHandle, Event, Finished, GenerateRequest, Refused, SequenceId, StopCause,
};
use crate::ids::ModelId;
use crate::text::TextModel;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// How long a model that could not be loaded, or whose engine died, is left alone. A pinned one and
/// one that ran is then loaded again by itself, others when they are asked for.
const RELOAD_PAUSE: Duration = Duration::from_secs(30);

/// A started engine and the memory of its weights and KV cache.
pub struct Loaded {
    pub engine: EngineHandle,
    pub bytes: u64,
}

/// Blocking. The error says what is wrong and what to do.
pub type Load = Box<dyn Fn() -> Result<Loaded, EngineError> + Send + Sync>;

/// A proven model that clients may name. Its text side is always here: what can be refused is
/// refused without a load.
pub struct ServedModel {
    pub qualified: QualifiedModel,
    pub text: Arc<TextModel>,
    /// Longest prompt plus output that the configuration allows, tokens.
    pub max_context: usize,
    pub load: Load,
}

/// One model as operators see it.
pub struct View {
    pub model: Arc<ServedModel>,
    pub engine: Option<EngineHandle>,
    pub resident: Resident,
    /// Why it is left alone now.
    pub failure: Option<String>,
}

impl View {
    pub fn state(&self) -> &'static str {
        match self.resident.phase {
            _ if self.failure.is_some() => "failed",
            Phase::Cold => "unloaded",
            Phase::Loading => "loading",
            Phase::Warm => "loaded",
            Phase::Unloading => "unloading",
        }
    }
}

struct Slot {
    model: Arc<ServedModel>,
    engine: Option<EngineHandle>,
    waiters: Vec<oneshot::Sender<Lease>>,
    failure: Option<(Instant, EngineError)>,
}

impl Slot {
    /// Time until the model may be tried again, where it failed lately.
    fn paused(&self) -> Option<Duration> {
        let (at, _) = self.failure.as_ref()?;
        RELOAD_PAUSE.checked_sub(at.elapsed())
    }
}

struct State {
    residency: Residency,
    slots: BTreeMap<ModelId, Slot>,
    loads: u64,
    unloads: u64,
    /// Failed loads and engines that ended by themselves, by the kind of their error.
    failures: BTreeMap<&'static str, u64>,
}

pub struct Fleet {
    state: Mutex<State>,
    /// How long a request waits for its model.
    patience: Duration,
    /// Requests that may wait for one model.
    max_waiting: usize,
}

/// The right to use a loaded model: it stays loaded until this is dropped.
struct Lease {
    fleet: Arc<Fleet>,
    id: ModelId,
    engine: EngineHandle,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.fleet.lock().residency.leave(self.id);
        self.fleet.settle();
    }
}

/// A place in the queue for a model that is not loaded.
struct Place {
    fleet: Arc<Fleet>,
    id: ModelId,
    granted: oneshot::Receiver<Lease>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.granted.close();
        self.fleet.lock().count_waiters(self.id);
        self.fleet.settle();
    }
}

enum Access {
    Now(Lease),
    Later(Place),
}

/// A request in an engine, or on its way to one.
pub struct Ticket(Kind);

enum Kind {
    Running(Lease, SequenceId),
    Waiting(CancellationToken),
}

impl Ticket {
    /// The sequence ends before the next step; its `Finished` follows.
    pub fn stop(&self) {
        match &self.0 {
            Kind::Running(lease, sequence) => lease.engine.stop(*sequence),
            Kind::Waiting(stop) => stop.cancel(),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Fleet {
    /// `budget`: bytes for weights and KV caches of all models together.
    pub fn new(config: &EngineSettings, budget: u64) -> Arc<Self> {
        let state = State {
            residency: Residency::new(budget),
            slots: BTreeMap::new(),
            loads: 0,
            unloads: 0,
            failures: BTreeMap::new(),
        };
        let patience = Duration::from_secs(config.model_wait_seconds);
        Arc::new(Self { state: Mutex::new(state), patience, max_waiting: config.max_waiting })
    }

    /// Makes a model available that takes about `bytes` once loaded. Refused when it can never fit
    /// beside the pinned ones.
    pub fn offer(&self, model: ServedModel, bytes: u64, pinned: bool) -> Result<(), EngineError> {
        let id = model.qualified.id();
        let mut state = self.lock();
        if !state.residency.offer(id, bytes, pinned) {
            return Err(too_large(bytes, state.residency.budget()));
        }
        state.slots.insert(
            id,
            Slot { model: Arc::new(model), engine: None, waiters: Vec::new(), failure: None },
        );
        Ok(())
    }

    /// Loads a model now and waits until that is done, however long it takes.
    pub async fn preload(self: &Arc<Self>, id: ModelId) -> Result<(), EngineError> {
        let mut place = match self.enter(id) {
            Ok(Access::Now(_)) => return Ok(()),
            Ok(Access::Later(place)) => place,
            Err(_) => return Err(self.failure(id)),
        };
        self.settle();
        let loaded = (&mut place.granted).await.map(drop);
        loaded.map_err(|_| self.failure(id))
    }

    /// Whether a model could be loaded without unloading another.
    pub fn has_room(&self, id: ModelId) -> bool {
        let state = self.lock();
        state.residency.get(id).bytes <= state.residency.free()
    }

    /// Never blocks. The channel holds every event of the sequence, so the engine never waits for a
    /// slow reader.
    pub fn submit(
        self: &Arc<Self>,
        id: ModelId,
        request: GenerateRequest,
    ) -> Result<(Ticket, mpsc::Receiver<Event>), Refused> {
        let (events, receiver) = mpsc::channel(request.event_capacity());
        let kind = match self.enter(id)? {
            Access::Now(lease) => {
                let sequence = lease.engine.submit_to(request, events)?;
                Kind::Running(lease, sequence)
            }
            Access::Later(place) => {
                let stop = CancellationToken::new();
                tokio::spawn(start_later(place, request, events, stop.clone()));
                self.settle();
                Kind::Waiting(stop)
            }
        };
        Ok((Ticket(kind), receiver))
    }

    pub fn views(self: &Arc<Self>) -> Vec<View> {
        let mut state = self.lock();
        let ids: Vec<ModelId> = state.slots.keys().copied().collect();
        for id in ids {
            self.bury(&mut state, id);
        }
        state.slots.values().map(|slot| state.view(slot)).collect()
    }

    /// Takes over an engine that was started elsewhere.
    pub fn adopt(&self, id: ModelId, loaded: Loaded) {
        // Its model was offered with room for it.
        let _ = self.lock().loaded(id, Ok(loaded));
    }

    /// Whether a request sent now finds a model, loaded or about to be once there was one.
    pub fn is_ready(self: &Arc<Self>) -> bool {
        let views = self.views();
        let served = self.lock().loads > 0;
        views.iter().any(|view| match view.resident.phase {
            Phase::Warm => true,
            Phase::Loading | Phase::Unloading => served,
            Phase::Cold => false,
        })
    }

    /// Engines of the loaded models.
    pub fn engines(&self) -> Vec<EngineHandle> {
        self.lock().slots.values().filter_map(|slot| slot.engine.clone()).collect()
    }

    pub fn models(&self) -> Vec<Arc<ServedModel>> {
        self.lock().slots.values().map(|slot| slot.model.clone()).collect()
    }

    pub fn get(&self, id: ModelId) -> Option<Arc<ServedModel>> {
        self.lock().slots.get(&id).map(|slot| slot.model.clone())
    }

    /// Bytes for all models, and how many of them are free.
    pub fn memory(&self) -> [u64; 2] {
        let state = self.lock();
        [state.residency.budget(), state.residency.free()]
    }

    /// Loads and unloads so far.
    pub fn turnover(&self) -> [u64; 2] {
        let state = self.lock();
        [state.loads, state.unloads]
    }

    /// Models that could not be loaded or whose engine ended by itself, so far, by the kind of the
    /// error.
    pub fn failures(&self) -> BTreeMap<&'static str, u64> {
        self.lock().failures.clone()
    }

    fn enter(self: &Arc<Self>, id: ModelId) -> Result<Access, Refused> {
        let mut guard = self.lock();
        let state = &mut *guard;
        self.bury(state, id);
        let slot = state
            .slots
            .get_mut(&id)
            .ok_or_else(|| Refused::Dead(EngineError::NotLoaded("it is not served here".into())))?;
        if let Some(retry_after) = slot.paused() {
            return Err(Refused::Overloaded { retry_after });
        }
        if let Some(engine) = slot.engine.clone()
            && state.residency.enter(id)
        {
            return Ok(Access::Now(Lease { fleet: self.clone(), id, engine }));
        }
        if slot.waiters.len() >= self.max_waiting {
            return Err(Refused::Overloaded { retry_after: self.patience });
        }
        let (waiter, granted) = oneshot::channel();
        slot.waiters.push(waiter);
        state.count_waiters(id);
        Ok(Access::Later(Place { fleet: self.clone(), id, granted }))
    }

    /// Does what there is to be done now.
    fn settle(self: &Arc<Self>) {
        let mut granted = Vec::new();
        let mut state = self.lock();
        while let Some(action) = state.residency.next_action() {
            match action {
                Action::Admit(id) => granted.extend(state.admit(self, id)),
                Action::Load(id) => self.clone().load(state.slot(id).model.clone()),
                Action::Unload(id) => self.clone().unload(id, state.slot(id).engine.take()),
            }
        }
        drop(state);
        for (waiter, lease) in granted {
            // Whoever has gone meanwhile gives its lease back by dropping it.
            let _ = waiter.send(lease);
        }
    }

    fn load(self: Arc<Self>, model: Arc<ServedModel>) {
        tokio::spawn(async move {
            let (began, id) = (Instant::now(), model.qualified.id());
            let name = model.qualified.manifest().name.clone();
            let loading = tokio::task::spawn_blocking(move || (model.load)());
            let outcome =
                loading.await.unwrap_or_else(|panic| Err(EngineError::Panicked(panic.to_string())));
            let seconds = began.elapsed().as_secs_f64();
            let mut state = self.lock();
            match state.loaded(id, outcome) {
                Ok(()) => tracing::info!(%name, seconds, "a model is loaded"),
                Err(why) => {
                    let kind = why.kind();
                    tracing::error!(%name, kind, %why, "a model could not be loaded");
                    if state.residency.get(id).pinned {
                        self.revive(id);
                    }
                }
            }
            drop(state);
            self.settle();
        });
    }

    fn unload(self: Arc<Self>, id: ModelId, engine: Option<EngineHandle>) {
        tokio::spawn(async move {
            // Waits for the engine's thread, and so for its memory. A panic there is logged where
            // it happens.
            let _ =
                tokio::task::spawn_blocking(move || engine.iter().for_each(EngineHandle::shutdown))
                    .await;
            let mut state = self.lock();
            state.residency.gone(id);
            state.unloads += 1;
            tracing::info!(name = %state.slot(id).model.qualified.manifest().name, "a model is unloaded");
            drop(state);
            self.settle();
        });
    }

    /// Notes the end of an engine that died by itself.
    fn bury(self: &Arc<Self>, state: &mut State, id: ModelId) {
        let engine = state.slots.get(&id).and_then(|slot| slot.engine.as_ref());
        if let Some(reason) = engine.and_then(EngineHandle::ended_by) {
            state.fail(id, EngineError::Stopped(Box::new(reason)));
            self.revive(id);
        }
    }

    fn revive(self: &Arc<Self>, id: ModelId) {
        let fleet = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(RELOAD_PAUSE).await;
            // Where it fails again that is logged, and seen in the status.
            let _ = fleet.preload(id).await;
        });
    }

    fn failure(&self, id: ModelId) -> EngineError {
        let failure = self.lock().slot(id).failure.as_ref().map(|(_, why)| why.clone());
        failure.unwrap_or_else(|| EngineError::NotLoaded("it was not loaded".into()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn slot(&mut self, id: ModelId) -> &mut Slot {
        self.slots.get_mut(&id).expect("invariant: ids come from offered models")
    }

    fn view(&self, slot: &Slot) -> View {
        let failure = slot.paused().and(slot.failure.as_ref()).map(|(_, why)| why.to_string());
        let resident = *self.residency.get(slot.model.qualified.id());
        View { model: slot.model.clone(), engine: slot.engine.clone(), resident, failure }
    }

    fn count_waiters(&mut self, id: ModelId) {
        let waiters = &mut self.slot(id).waiters;
        waiters.retain(|waiter| !waiter.is_closed());
        let count = waiters.len();
        self.residency.set_waiting(id, count);
    }

    /// Those who waited, each with its lease.
    fn admit(&mut self, fleet: &Arc<Fleet>, id: ModelId) -> Vec<(oneshot::Sender<Lease>, Lease)> {
        let slot = self.slot(id);
        let engine = slot.engine.clone().expect("invariant: a warm model has an engine");
        let lease = |waiter| (waiter, Lease { fleet: fleet.clone(), id, engine: engine.clone() });
        slot.waiters.drain(..).map(lease).collect()
    }

    fn loaded(
        &mut self,
        id: ModelId,
        outcome: Result<Loaded, EngineError>,
    ) -> Result<(), EngineError> {
        self.loads += 1;
        let taken = outcome.and_then(|Loaded { engine, bytes }| {
            if !self.residency.loaded(id, bytes) {
                return Err(too_large(bytes, self.residency.budget()));
            }
            Ok(engine)
        });
        match taken {
            Ok(engine) => {
                let slot = self.slot(id);
                (slot.engine, slot.failure) = (Some(engine), None);
                Ok(())
            }
            Err(why) => {
                self.fail(id, why.clone());
                Err(why)
            }
        }
    }

    /// Nobody waits for it any longer, and it is left alone for a while.
    fn fail(&mut self, id: ModelId, why: EngineError) {
        *self.failures.entry(why.kind()).or_default() += 1;
        let slot = self.slot(id);
        slot.engine = None;
        slot.failure = Some((Instant::now(), why));
        slot.waiters.clear();
        self.residency.set_waiting(id, 0);
        self.residency.gone(id);
    }
}

/// Submits a request once its model is loaded, and ends it where that does not come about.
async fn start_later(
    mut place: Place,
    request: GenerateRequest,
    events: mpsc::Sender<Event>,
    stop: CancellationToken,
) {
    let patience = place.fleet.patience;
    let cause = tokio::select! {
        biased;
        () = stop.cancelled() => StopCause::Stopped,
        granted = &mut place.granted => match granted.map(|lease| (lease.engine.submit_to(request, events.clone()), lease)) {
            Ok((Ok(sequence), lease)) => {
                drop(events);
                stop.cancelled().await;
                return lease.engine.stop(sequence);
            }
            Ok((Err(_), _)) => StopCause::TurnedAway,
            Err(_) => {
                StopCause::Failed(EngineError::NotLoaded("its model could not be loaded".into()))
            },
        },
        () = tokio::time::sleep(patience) => StopCause::TurnedAway,
    };
    let finished = Finished { cause, prompt_tokens: 0, cached_tokens: 0, completion_tokens: 0 };
    // The reader may have gone.
    let _ = events.try_send(Event::Finished(finished));
}

fn too_large(bytes: u64, budget: u64) -> EngineError {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    EngineError::OutOfMemory(format!(
        "it takes about {} MiB beside the models that stay loaded, and all of them may take {} MiB: \
         raise engine.memory_mib, or lower engine.kv_mib",
        mib(bytes),
        mib(budget)
    ))
}

//! The models that this node serves, loaded or not. The pool hands requests to engines, and loads
//! and unloads models as `eviction` decides.
//!
//! Loading runs on threads that may block, so no stream ever waits for another model's load. A
//! request for a model that is not loaded waits for it, for `engine.model_wait_seconds` at most;
//! its stream is kept alive meanwhile as in any queue.

#![expect(
    clippy::disallowed_methods,
    reason = "loads are timed, and failures are kept for a while"
)]

mod access;
mod canary;
mod eviction;
mod view;
mod watchdog;
mod withheld;

pub use access::SubmittedRequest;
pub use eviction::{LoadPhase, ModelUsage};
pub use view::ModelView;

use crate::catalogue::QualifiedModel;
use crate::config::EngineSettings;
use crate::engine::{EngineError, EngineHandle, GenerateRequest, Refused, SequenceEvent};
use crate::ids::ModelId;
use crate::text::TextModel;
use access::{EngineAccess, EngineLease, QueueSlot};
use canary::LatestEnds;
use eviction::{Eviction, PoolAction};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use watchdog::StepWatch;
use withheld::Withheld;

/// Time before a model whose load or engine failed may be loaded again: long enough that a broken
/// model does not keep the machine busy with loads. A pinned model, and one whose engine ended by
/// itself, are then loaded again without a request, others when a request names them.
const RELOAD_PAUSE: Duration = Duration::from_secs(30);

/// A started engine and the memory of its weights and KV cache.
pub struct LoadedEngine {
    pub engine: EngineHandle,
    pub bytes: u64,
}

/// Loads a model's weights and starts its engine. It blocks. The error says what is wrong and what
/// to do.
pub type EngineLoader = Arc<dyn Fn() -> Result<LoadedEngine, EngineError> + Send + Sync>;

/// A qualified model that clients may name. Its text side is in memory whether or not its engine
/// is, so that a request which has to be refused is refused without a load.
#[derive(Clone)]
pub struct ServedModel {
    pub qualified: QualifiedModel,
    pub text: Arc<TextModel>,
    /// Longest prompt plus output that the configuration allows, tokens.
    pub max_context: usize,
    /// Whether answers can be kept to formats, which the sampler of a device does not do.
    pub keeps_formats: bool,
    pub load: EngineLoader,
}

struct ModelEntry {
    model: Arc<ServedModel>,
    engine: Option<EngineHandle>,
    waiters: Vec<oneshot::Sender<EngineLease>>,
    /// The last failure and its time; `None` after a load that succeeded.
    failure: Option<(Instant, EngineError)>,
    ends: LatestEnds,
    steps: StepWatch,
    /// Why the model is not offered: its proof has gone.
    withheld: Option<Withheld>,
}

impl ModelEntry {
    /// Time until the model may be loaded again after a failure; `None` when it may be now.
    fn reload_pause(&self) -> Option<Duration> {
        let (at, _) = self.failure.as_ref()?;
        RELOAD_PAUSE.checked_sub(at.elapsed())
    }
}

struct PoolState {
    eviction: Eviction,
    entries: BTreeMap<ModelId, ModelEntry>,
    loads: u64,
    unloads: u64,
    /// Failed loads and engines that ended by themselves, by the kind of their error.
    failures: BTreeMap<&'static str, u64>,
    /// Cancelled once a load or an engine has lost its device.
    device_lost: CancellationToken,
}

/// The models of a node and the memory that they share.
pub struct ModelPool {
    state: Mutex<PoolState>,
    /// Longest time that a request waits for its model.
    max_wait: Duration,
    /// Requests that may wait for one model.
    max_waiting: usize,
    /// Requests of a model that fail in a row before the model is withdrawn.
    withdraw_after: u32,
    /// Between two canaries of a withdrawn model, and the longest that one may take.
    canary_pause: Duration,
    /// Loads and unloads run here. The last user of a model may be dropped on any thread, also on
    /// one outside the runtime.
    runtime: Handle,
}

impl ModelPool {
    /// `budget` is in bytes, for weights and KV caches of all models together. Must be called
    /// within a tokio runtime, on which models are then loaded and unloaded.
    pub fn new(config: &EngineSettings, budget: u64) -> Arc<Self> {
        let state = PoolState {
            eviction: Eviction::new(budget),
            entries: BTreeMap::new(),
            loads: 0,
            unloads: 0,
            failures: BTreeMap::new(),
            device_lost: CancellationToken::new(),
        };
        let stalled_after = Duration::from_secs(config.stalled_step_seconds);
        let pool = Arc::new(Self {
            state: Mutex::new(state),
            max_wait: Duration::from_secs(config.model_wait_seconds),
            max_waiting: config.max_waiting,
            withdraw_after: config.withdraw_after_failures,
            canary_pause: Duration::from_secs(config.canary_pause_seconds),
            runtime: Handle::current(),
        });
        watchdog::start(&pool, stalled_after);
        pool
    }

    /// Makes a model available that takes about `bytes` once loaded. Fails with
    /// `OutOfMemory` when the model can never fit beside the pinned ones.
    pub fn offer(&self, model: ServedModel, bytes: u64, pinned: bool) -> Result<(), EngineError> {
        let id = model.qualified.id();
        let mut state = self.lock();
        if !state.eviction.offer(id, bytes, pinned) {
            return Err(too_large(bytes, state.eviction.budget()));
        }
        state.entries.insert(
            id,
            ModelEntry {
                model: Arc::new(model),
                engine: None,
                waiters: Vec::new(),
                failure: None,
                ends: LatestEnds::default(),
                steps: StepWatch::default(),
                withheld: None,
            },
        );
        Ok(())
    }

    /// Replaces what is told about a model and what its requests cost. Requests that have begun
    /// keep what they began with, and a loaded engine stays.
    pub fn describe_anew(&self, qualified: QualifiedModel) {
        if let Some(entry) = self.lock().entries.get_mut(&qualified.id()) {
            entry.model = Arc::new(ServedModel { qualified, ..(*entry.model).clone() });
        }
    }

    /// The model with this id if requests may name it.
    pub fn offered(&self, id: ModelId) -> Option<Arc<ServedModel>> {
        let state = self.lock();
        let entry = state.entries.get(&id).filter(|entry| entry.withheld.is_none());
        entry.map(|entry| entry.model.clone())
    }

    /// The model with this id, loaded or not, offered or not.
    pub fn get(&self, id: ModelId) -> Option<Arc<ServedModel>> {
        self.lock().entries.get(&id).map(|entry| entry.model.clone())
    }

    /// Loads a model now and waits until that is done, however long it takes.
    pub async fn preload(self: &Arc<Self>, id: ModelId) -> Result<(), EngineError> {
        // The bound is one of requests, so a queue that they have filled does not refuse this.
        let mut slot = match self.acquire(id, usize::MAX) {
            Ok(EngineAccess::Granted(_)) => return Ok(()),
            Ok(EngineAccess::Queued(slot)) => slot,
            Err(_) => return Err(self.last_failure(id)),
        };
        self.run_actions();
        let loaded = (&mut slot.granted).await.map(drop);
        loaded.map_err(|_| self.last_failure(id))
    }

    /// Unloads a model that has no requests. The next request for it loads it again.
    pub fn unload_idle(self: &Arc<Self>, id: ModelId) -> Result<(), String> {
        let mut state = self.lock();
        let usage = *state.eviction.get(id);
        if usage.pinned {
            return Err("it was started with --model, so it stays in memory".into());
        }
        let requests = usage.active + usage.waiting;
        if requests > 0 {
            return Err(format!("requests for it run or wait ({requests})"));
        }
        if usage.phase != LoadPhase::Loaded {
            return Err("it is not in memory".into());
        }
        state.end_engine(self, id);
        Ok(())
    }

    /// Whether a model could be loaded without unloading another.
    pub fn has_room(&self, id: ModelId) -> bool {
        let state = self.lock();
        state.eviction.get(id).bytes <= state.eviction.free()
    }

    /// Submits a request to its model's engine, or queues it until the model is loaded. Never
    /// blocks. The channel holds every event of the sequence, so the engine never waits for a
    /// slow reader. A refusal is `Overloaded` also where the model's queue is full, where the model
    /// is withdrawn, or where a load or its engine failed within `RELOAD_PAUSE`.
    pub fn submit(
        self: &Arc<Self>,
        id: ModelId,
        request: GenerateRequest,
    ) -> Result<(SubmittedRequest, mpsc::Receiver<SequenceEvent>), Refused> {
        self.check_offered(id)?;
        self.submit_canary(id, request)
    }

    /// `submit` for a model that may be withdrawn.
    fn submit_canary(
        self: &Arc<Self>,
        id: ModelId,
        request: GenerateRequest,
    ) -> Result<(SubmittedRequest, mpsc::Receiver<SequenceEvent>), Refused> {
        let (events, receiver) = mpsc::channel(request.event_capacity());
        let submission = match self.acquire(id, self.max_waiting)? {
            EngineAccess::Granted(lease) => {
                let sequence = lease.engine.submit_to(request, events)?;
                SubmittedRequest::running(lease, sequence)
            }
            EngineAccess::Queued(slot) => {
                let submission = SubmittedRequest::queued(slot, request, events);
                self.run_actions();
                submission
            }
        };
        Ok((submission, receiver))
    }

    /// The model's engine, or a place in the model's queue unless `max_waiting` wait there. After a
    /// place was given, the caller calls `run_actions`, which begins the load.
    fn acquire(self: &Arc<Self>, id: ModelId, max_waiting: usize) -> Result<EngineAccess, Refused> {
        let mut guard = self.lock();
        let state = &mut *guard;
        self.mark_dead(state, id);
        let entry = state.entries.get_mut(&id).ok_or_else(not_served)?;
        if let Some(Withheld::FilesChanged(why)) = &entry.withheld {
            return Err(Refused::Dead(EngineError::FilesChanged(why.clone())));
        }
        if let Some(retry_after) = entry.reload_pause() {
            return Err(Refused::Overloaded { retry_after });
        }
        if let Some(engine) = entry.engine.clone()
            && state.eviction.begin_request(id)
        {
            return Ok(EngineAccess::Granted(EngineLease { pool: self.clone(), id, engine }));
        }
        if entry.waiters.len() >= max_waiting {
            return Err(Refused::Overloaded { retry_after: self.max_wait });
        }
        let (waiter, granted) = oneshot::channel();
        entry.waiters.push(waiter);
        state.count_waiters(id);
        Ok(EngineAccess::Queued(QueueSlot { pool: self.clone(), id, granted }))
    }

    /// Does what `eviction` decides: grants leases, begins loads and unloads. To be called after
    /// every change that may lead to a decision.
    fn run_actions(self: &Arc<Self>) {
        let mut granted = Vec::new();
        let mut state = self.lock();
        while let Some(action) = state.eviction.next_action() {
            match action {
                PoolAction::Grant(id) => granted.extend(state.grant_waiting(self, id)),
                PoolAction::Load(id) => self.clone().load(state.entry(id).model.clone()),
                PoolAction::Unload(id) => self.clone().unload(id, state.entry(id).engine.take()),
            }
        }
        drop(state);
        for (waiter, lease) in granted {
            // If the waiter has gone meanwhile, the lease is returned here and dropped.
            let _ = waiter.send(lease);
        }
    }

    fn load(self: Arc<Self>, model: Arc<ServedModel>) {
        self.runtime.clone().spawn(async move {
            let (began, id) = (Instant::now(), model.qualified.id());
            let name = model.qualified.manifest().name.clone();
            let loading = tokio::task::spawn_blocking(move || (model.load)());
            let outcome =
                loading.await.unwrap_or_else(|panic| Err(EngineError::Panicked(panic.to_string())));
            let seconds = began.elapsed().as_secs_f64();
            let mut state = self.lock();
            match state.finish_load(id, outcome) {
                Ok(()) => tracing::info!(%name, seconds, "a model is loaded"),
                Err(why) => {
                    let kind = why.kind();
                    tracing::error!(%name, kind, %why, "a model could not be loaded");
                    if state.entry(id).withheld.is_none() && state.eviction.get(id).pinned {
                        self.retry_load(id);
                    }
                }
            }
            drop(state);
            self.run_actions();
        });
    }

    fn unload(self: Arc<Self>, id: ModelId, engine: Option<EngineHandle>) {
        self.runtime.clone().spawn(async move {
            // Waits for the engine's thread, and so for its memory. A panic there is logged by the
            // thread.
            let _ =
                tokio::task::spawn_blocking(move || engine.iter().for_each(EngineHandle::shutdown))
                    .await;
            let mut state = self.lock();
            state.eviction.mark_unloaded(id);
            state.unloads += 1;
            let name = &state.entry(id).model.qualified.manifest().name;
            tracing::info!(%name, "a model is unloaded");
            drop(state);
            self.run_actions();
        });
    }

    /// Records that an engine has ended by itself, if it has, and has its model loaded again later.
    fn mark_dead(self: &Arc<Self>, state: &mut PoolState, id: ModelId) {
        let engine = state.entries.get(&id).and_then(|entry| entry.engine.as_ref());
        if let Some(reason) = engine.and_then(EngineHandle::ended_by) {
            state.mark_failed(id, EngineError::Stopped(Box::new(reason)));
            self.retry_load(id);
        }
    }

    /// Loads the model again after `RELOAD_PAUSE`.
    fn retry_load(self: &Arc<Self>, id: ModelId) {
        let pool = self.clone();
        self.runtime.spawn(async move {
            tokio::time::sleep(RELOAD_PAUSE).await;
            // The load logs a second failure, and the status shows it.
            let _ = pool.preload(id).await;
        });
    }

    /// Waits until a device is lost. No model can be loaded on it again before this process has
    /// ended.
    pub async fn device_lost(&self) {
        let lost = self.lock().device_lost.clone();
        lost.cancelled().await;
    }

    fn last_failure(&self, id: ModelId) -> EngineError {
        let failure = self.lock().entry(id).failure.as_ref().map(|(_, why)| why.clone());
        failure.unwrap_or_else(|| EngineError::NotLoaded("it was not loaded".into()))
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PoolState {
    fn entry(&mut self, id: ModelId) -> &mut ModelEntry {
        self.entries.get_mut(&id).expect("invariant: ids come from offered models")
    }

    fn view(&self, entry: &ModelEntry) -> ModelView {
        let failure = entry.reload_pause().and(entry.failure.as_ref());
        let withdrawn = entry.ends.withdrawn.then(|| {
            "all its latest requests failed; it is offered again once a request of the node's own \
             was answered"
                .to_owned()
        });
        let withdrawn = withdrawn.or_else(|| entry.steps.stalled.clone());
        ModelView {
            model: entry.model.clone(),
            engine: entry.engine.clone(),
            usage: *self.eviction.get(entry.model.qualified.id()),
            failure: failure
                .map(|(_, why)| why.to_string())
                .or_else(|| entry.withheld.as_ref().map(|withheld| withheld.why().to_owned()))
                .or(withdrawn),
        }
    }

    /// Removes waiters that have given up, and tells `eviction` how many are left.
    fn count_waiters(&mut self, id: ModelId) {
        let waiters = &mut self.entry(id).waiters;
        waiters.retain(|waiter| !waiter.is_closed());
        let count = waiters.len();
        self.eviction.set_waiting(id, count);
    }

    /// Takes the waiters of a loaded model, each with its lease.
    fn grant_waiting(
        &mut self,
        pool: &Arc<ModelPool>,
        id: ModelId,
    ) -> Vec<(oneshot::Sender<EngineLease>, EngineLease)> {
        let entry = self.entry(id);
        let engine = entry.engine.clone().expect("invariant: a loaded model has an engine");
        let lease =
            |waiter| (waiter, EngineLease { pool: pool.clone(), id, engine: engine.clone() });
        entry.waiters.drain(..).map(lease).collect()
    }

    fn finish_load(
        &mut self,
        id: ModelId,
        outcome: Result<LoadedEngine, EngineError>,
    ) -> Result<(), EngineError> {
        self.loads += 1;
        let withheld = self.entry(id).withheld.clone();
        let fitting = outcome.and_then(|LoadedEngine { engine, bytes }| {
            if let Some(Withheld::FilesChanged(why)) = withheld {
                return Err(EngineError::FilesChanged(why));
            }
            if !self.eviction.finish_load(id, bytes) {
                return Err(too_large(bytes, self.eviction.budget()));
            }
            Ok(engine)
        });
        match fitting {
            Ok(engine) => {
                let (entry, served) = (self.entry(id), engine.options().max_context);
                if served < entry.model.max_context {
                    // The cache of this load holds less than the configuration allows.
                    Arc::make_mut(&mut entry.model).max_context = served;
                }
                (entry.engine, entry.failure) = (Some(engine), None);
                Ok(())
            }
            Err(why) => {
                let entry = self.entry(id);
                let record = entry.model.qualified.record_id();
                if let Some(withheld) = Withheld::by_load(&why, record) {
                    entry.withheld = Some(withheld);
                }
                self.mark_failed(id, why.clone());
                Err(why)
            }
        }
    }

    /// Turns all waiters away; the model is not loaded again before `RELOAD_PAUSE` has passed.
    fn mark_failed(&mut self, id: ModelId, why: EngineError) {
        *self.failures.entry(why.kind()).or_default() += 1;
        if why.is_device_lost() {
            self.device_lost.cancel();
        }
        let entry = self.entry(id);
        entry.engine = None;
        entry.failure = Some((Instant::now(), why));
        entry.waiters.clear();
        self.eviction.set_waiting(id, 0);
        self.eviction.mark_unloaded(id);
    }
}

fn not_served() -> Refused {
    Refused::Dead(EngineError::NotLoaded("the model is not served here".into()))
}

fn too_large(bytes: u64, budget: u64) -> EngineError {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    EngineError::OutOfMemory(format!(
        "it takes about {} MiB beside the models that stay loaded, and all of them may take {} MiB: \
         raise engine.memory_mib, or lower engine.kv_mib (on a GPU engine.gpu_kv_mib)",
        mib(bytes),
        mib(budget)
    ))
}

#[cfg(test)]
mod tests;

//! The models that this node serves, loaded or not. The pool loads and unloads them, on each device
//! as `eviction` decides; `access` hands requests to their engines, on the device that `placement`
//! chooses.
//!
//! Loading runs on threads that may block, so no stream ever waits for another model's load. A
//! request for a model that is not loaded waits for it, for `engine.model_wait_seconds` at most;
//! its stream is kept alive meanwhile as in any queue.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]
#![expect(
    clippy::disallowed_methods,
    reason = "loads are timed, and failures are kept for a while"
)]

mod access;
mod canary;
mod eviction;
mod lease;
mod placement;
mod state;
mod step_watch;
mod view;
mod watchdog;
mod withheld;

pub use access::SubmittedRequest;
pub use eviction::{LoadPhase, ModelUsage};
pub use view::{DeviceView, ModelView};

use access::EngineAccess;
use canary::LatestEnds;
use cresset_base::ModelId;
use cresset_catalogue::QualifiedModel;
use cresset_engine::{EngineError, EngineHandle, EngineSettings, Refused};
use cresset_text::TextModel;
use parking_lot::Mutex;
use placement::Place;
use state::{ModelEntry, PoolState, Replica};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Time before a model whose load or engine failed may be loaded again: long enough that a broken
/// model does not keep the machine busy with loads. A pinned model, and one whose engine ended by
/// itself, are then loaded again without a request, others when a request names them.
const RELOAD_PAUSE: Duration = Duration::from_secs(30);

/// A started engine and the memory of its weights and KV cache.
pub struct LoadedEngine {
    pub engine: EngineHandle,
    pub bytes: u64,
}

/// Loads a model's weights and starts its engine on the device with this number in the pool. It
/// blocks. The error says what is wrong and what to do.
pub type EngineLoader = Arc<dyn Fn(usize) -> Result<LoadedEngine, EngineError> + Send + Sync>;

/// A device that models run on.
#[derive(Clone, Debug)]
pub struct DeviceBudget {
    pub name: String,
    /// Bytes for weights and KV caches of all models that are loaded there together.
    pub bytes: u64,
}

impl DeviceBudget {
    /// The only device of a node whose models run on the CPU.
    pub fn cpu(bytes: u64) -> Vec<Self> {
        vec![Self { name: "cpu".to_owned(), bytes }]
    }
}

/// A qualified model that clients may name. Its text side is in memory whether or not its engine
/// is, so that a request which has to be refused is refused without a load.
#[derive(Clone)]
pub struct ServedModel {
    pub qualified: QualifiedModel,
    pub text: Arc<TextModel>,
    /// Longest prompt plus output that the configuration allows, tokens.
    pub max_context: usize,
    /// Whether longer contexts are proven while it is served.
    pub context_rises: bool,
    pub load: EngineLoader,
}

impl ServedModel {
    /// The longest context that can be proven of it, tokens: the model's own, or less where the
    /// configuration or its cache allows less.
    pub fn context_goal(&self) -> u32 {
        let most = u32::try_from(self.max_context).unwrap_or(u32::MAX);
        most.min(self.qualified.manifest().limits.model_context_tokens)
    }

    /// How the proof of its context stands, in a word.
    pub fn context_state(&self) -> &'static str {
        let qualified = &self.qualified;
        if qualified.qualified_context_tokens() >= self.context_goal() {
            "complete"
        } else if qualified.failed_context().is_some() {
            "stopped"
        } else if self.context_rises {
            "rising"
        } else {
            "partial"
        }
    }
}

/// The models of a node and the memory that they share.
pub struct ModelPool {
    state: Mutex<PoolState>,
    settings: EngineSettings,
    /// Loads and unloads run here. The last user of a model may be dropped on any thread, also on
    /// one outside the runtime.
    runtime: Handle,
}

impl ModelPool {
    /// Must be called within a tokio runtime, on which models are then loaded and unloaded.
    pub fn new(settings: &EngineSettings, devices: Vec<DeviceBudget>) -> Arc<Self> {
        let stalled_after = Duration::from_secs(settings.stalled_step_seconds);
        let pool = Arc::new(Self {
            state: Mutex::new(PoolState::new(devices)),
            settings: settings.clone(),
            runtime: Handle::current(),
        });
        watchdog::start(&pool, stalled_after);
        pool
    }

    /// Longest time that a request waits for its model.
    fn max_wait(&self) -> Duration {
        Duration::from_secs(self.settings.model_wait_seconds)
    }

    /// Makes a model available that takes about `bytes` once loaded. Fails with
    /// `OutOfMemory` when the model can never fit beside the pinned ones.
    pub fn offer(&self, model: ServedModel, bytes: u64, pinned: bool) -> Result<(), EngineError> {
        let id = model.qualified.id();
        let mut state = self.state.lock();
        for device in &mut state.devices {
            if !device.eviction.offer(id, bytes, pinned) {
                return Err(too_large(bytes, device.eviction.budget()));
            }
        }
        let replicas = state.devices.iter().map(|_| Replica::default()).collect();
        let (model, ends) = (Arc::new(model), LatestEnds::default());
        state.entries.insert(id, ModelEntry { model, replicas, ends, withheld: None });
        Ok(())
    }

    /// Replaces what is told about a model and what its requests cost. Requests that have begun
    /// keep what they began with, and a loaded engine stays.
    pub fn describe_anew(&self, qualified: QualifiedModel) {
        if let Some(entry) = self.state.lock().entries.get_mut(&qualified.id()) {
            entry.model = Arc::new(ServedModel { qualified, ..(*entry.model).clone() });
        }
    }

    /// Replaces the proof of a model, under the terms that are in force.
    pub fn renew_proof(&self, proven: QualifiedModel) {
        if let Some(entry) = self.state.lock().entries.get_mut(&proven.id()) {
            let qualified = proven.described_by(entry.model.qualified.manifest());
            entry.model = Arc::new(ServedModel { qualified, ..(*entry.model).clone() });
        }
    }

    /// The model with this id, loaded or not, offered or not.
    pub fn get(&self, id: ModelId) -> Option<Arc<ServedModel>> {
        self.state.lock().entries.get(&id).map(|entry| entry.model.clone())
    }

    /// Loads a model now and waits until that is done, however long it takes. Where there are
    /// several devices, one that could load it is enough.
    pub async fn preload(self: &Arc<Self>, id: ModelId) -> Result<(), EngineError> {
        let places = self.state.lock().places_to_load(id);
        let loading: Vec<_> = places.into_iter().map(|at| self.clone().preload_at(at)).collect();
        let mut outcome = Err(EngineError::NotLoaded("it was not loaded".into()));
        for one in loading {
            outcome = outcome.or(one.await);
        }
        outcome
    }

    /// Loads a model on one device. The load begins at once.
    fn preload_at(
        self: Arc<Self>,
        place: Place,
    ) -> impl Future<Output = Result<(), EngineError>> + Send {
        // The bound is one of requests, so a queue that they have filled does not refuse this.
        let access = self.acquire_at(&mut self.state.lock(), place, usize::MAX);
        self.run_actions();
        async move {
            let loaded = match access {
                Ok(EngineAccess::Granted(_)) => return Ok(()),
                Ok(EngineAccess::Queued(mut slot)) => (&mut slot.granted).await.is_ok(),
                Err(_) => false,
            };
            if loaded { Ok(()) } else { Err(self.last_failure(place)) }
        }
    }

    /// Unloads a model that has no requests. The next request for it loads it again.
    pub fn unload_idle(self: &Arc<Self>, id: ModelId) -> Result<(), String> {
        let mut state = self.state.lock();
        let usage = state.view(&state.entries[&id]).usage;
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
        state.places(id).for_each(|place| state.end_engine(self, place));
        Ok(())
    }

    /// Whether a model could be loaded without unloading another.
    pub fn has_room(&self, id: ModelId) -> bool {
        let state = self.state.lock();
        state.live_places(id).any(|place| state.has_room(place))
    }

    fn load(self: Arc<Self>, place: Place, model: Arc<ServedModel>) {
        self.runtime.clone().spawn(async move {
            let (began, device) = (Instant::now(), place.device);
            let name = model.qualified.manifest().name.clone();
            let loading = tokio::task::spawn_blocking(move || (model.load)(device));
            let outcome =
                loading.await.unwrap_or_else(|panic| Err(EngineError::Panicked(panic.to_string())));
            let seconds = began.elapsed().as_secs_f64();
            let mut state = self.state.lock();
            let loaded = state.finish_load(place, outcome);
            let device = &state.devices[place.device].name;
            match loaded {
                Ok(()) => tracing::info!(%name, device, seconds, "a model is loaded"),
                Err(why) => {
                    let kind = why.kind();
                    tracing::error!(%name, device, kind, %why, "a model could not be loaded");
                    if state.entry(place.model).withheld.is_none() && state.usage(place).pinned {
                        self.retry_load(place);
                    }
                }
            }
            drop(state);
            self.run_actions();
        });
    }

    fn unload(self: Arc<Self>, place: Place, engine: Option<EngineHandle>) {
        self.runtime.clone().spawn(async move {
            // Waits for the engine's thread, and so for its memory. A panic there is logged by the
            // thread.
            let _ =
                tokio::task::spawn_blocking(move || engine.iter().for_each(EngineHandle::shutdown))
                    .await;
            let mut state = self.state.lock();
            state.eviction(place).mark_unloaded(place.model);
            state.unloads += 1;
            let device = state.devices[place.device].name.clone();
            let name = &state.entry(place.model).model.qualified.manifest().name;
            tracing::info!(%name, device, "a model is unloaded");
            drop(state);
            self.run_actions();
        });
    }

    /// Records which of a model's engines have ended by themselves, and has the model loaded again
    /// later.
    fn mark_dead(self: &Arc<Self>, state: &mut PoolState, id: ModelId) {
        let Some(entry) = state.entries.get(&id) else { return };
        let ended = entry.replicas.iter().enumerate().filter_map(|(device, replica)| {
            Some((device, replica.engine.as_ref().and_then(EngineHandle::ended_by)?))
        });
        for (device, reason) in ended.collect::<Vec<_>>() {
            let place = Place { device, model: id };
            state.mark_failed(place, EngineError::Stopped(Box::new(reason)));
            self.retry_load(place);
        }
    }

    /// Loads the model again after `RELOAD_PAUSE`, unless its device is lost.
    fn retry_load(self: &Arc<Self>, place: Place) {
        let pool = self.clone();
        self.runtime.spawn(async move {
            tokio::time::sleep(RELOAD_PAUSE).await;
            if !pool.state.lock().devices[place.device].is_lost {
                // The load logs a second failure, and the status shows it.
                let _ = pool.preload_at(place).await;
            }
        });
    }

    /// Waits until all devices are lost. No model can be loaded on them again before this process
    /// has ended.
    pub async fn all_devices_lost(&self) {
        let lost = self.state.lock().all_lost.clone();
        lost.cancelled().await;
    }

    fn last_failure(&self, place: Place) -> EngineError {
        let failure = self.state.lock().replica(place).failure.as_ref().map(|(_, why)| why.clone());
        failure.unwrap_or_else(|| EngineError::NotLoaded("it was not loaded".into()))
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

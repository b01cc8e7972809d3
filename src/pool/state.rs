//! What the pool knows: its devices, its models, and how each model stands on each device.

use super::canary::LatestEnds;
use super::eviction::{Eviction, LoadPhase, ModelUsage, PoolAction};
use super::lease::EngineLease;
use super::placement::{self, Place, Placement, PossiblePlace};
use super::step_watch::StepWatch;
use super::withheld::Withheld;
use super::{
    DeviceBudget, LoadedEngine, ModelPool, RELOAD_PAUSE, ServedModel, not_served, too_large,
};
use cresset_base::ModelId;
use cresset_engine::{EngineError, EngineHandle, Refused};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// How a model stands on one device.
#[derive(Default)]
pub(super) struct Replica {
    pub engine: Option<EngineHandle>,
    pub waiters: Vec<oneshot::Sender<EngineLease>>,
    /// The last failure and its time; `None` after a load that succeeded.
    pub failure: Option<(Instant, EngineError)>,
    pub steps: StepWatch,
}

impl Replica {
    /// Time until the model may be loaded again after a failure; `None` when it may be now.
    pub(super) fn reload_pause(&self) -> Option<Duration> {
        let (at, _) = self.failure.as_ref()?;
        RELOAD_PAUSE.checked_sub(at.elapsed())
    }

    /// Why no request is sent here.
    pub(super) fn failure(&self) -> Option<String> {
        let failure = self.reload_pause().and(self.failure.as_ref());
        failure.map(|(_, why)| why.to_string()).or_else(|| self.steps.stalled.clone())
    }
}

pub(super) struct ModelEntry {
    pub model: Arc<ServedModel>,
    /// One for each device.
    pub replicas: Vec<Replica>,
    pub ends: LatestEnds,
    /// Why the model is not offered: its proof has gone.
    pub withheld: Option<Withheld>,
}

pub(super) struct PoolDevice {
    pub name: String,
    pub eviction: Eviction,
    /// It refuses every further call until this process has ended.
    pub is_lost: bool,
}

pub(super) struct PoolState {
    pub devices: Vec<PoolDevice>,
    pub entries: BTreeMap<ModelId, ModelEntry>,
    pub loads: u64,
    pub unloads: u64,
    /// Failed loads and engines that ended by themselves, by the kind of their error.
    pub failures: BTreeMap<&'static str, u64>,
    /// Cancelled once every device is lost.
    pub all_lost: CancellationToken,
}

impl PoolState {
    pub(super) fn new(budgets: Vec<DeviceBudget>) -> Self {
        let device = |DeviceBudget { name, bytes }| {
            let eviction = Eviction::new(bytes);
            PoolDevice { name, eviction, is_lost: false }
        };
        Self {
            devices: budgets.into_iter().map(device).collect(),
            entries: BTreeMap::new(),
            loads: 0,
            unloads: 0,
            failures: BTreeMap::new(),
            all_lost: CancellationToken::new(),
        }
    }

    pub(super) fn entry(&mut self, id: ModelId) -> &mut ModelEntry {
        self.entries.get_mut(&id).expect("invariant: ids come from offered models")
    }

    pub(super) fn name_of(&mut self, id: ModelId) -> String {
        self.entry(id).model.qualified.manifest().name.clone()
    }

    pub(super) fn replica(&mut self, place: Place) -> &mut Replica {
        &mut self.entry(place.model).replicas[place.device]
    }

    pub(super) fn eviction(&mut self, place: Place) -> &mut Eviction {
        &mut self.devices[place.device].eviction
    }

    pub(super) fn usage(&self, place: Place) -> ModelUsage {
        *self.devices[place.device].eviction.get(place.model)
    }

    /// The model on each device.
    pub(super) fn places(&self, model: ModelId) -> impl Iterator<Item = Place> + use<> {
        (0..self.devices.len()).map(move |device| Place { device, model })
    }

    /// The model on each device that is not lost.
    pub(super) fn live_places(&self, model: ModelId) -> impl Iterator<Item = Place> {
        self.places(model).filter(|place| !self.devices[place.device].is_lost)
    }

    /// Whether the model could be loaded there without unloading another one.
    pub(super) fn has_room(&self, place: Place) -> bool {
        self.usage(place).bytes <= self.devices[place.device].eviction.free()
    }

    /// Where a model is loaded that an operator or a start asks for: everywhere if it is to stay
    /// loaded, else where it is or has room, or on one device at least.
    pub(super) fn places_to_load(&self, id: ModelId) -> Vec<Place> {
        let is_wanted = |place: &Place| {
            let usage = self.usage(*place);
            usage.pinned || usage.phase == LoadPhase::Loaded || self.has_room(*place)
        };
        let wanted: Vec<Place> = self.live_places(id).filter(is_wanted).collect();
        let first = || self.live_places(id).chain(self.places(id)).take(1).collect();
        if wanted.is_empty() { first() } else { wanted }
    }

    /// Where a request of this session runs. `stall_pause` is what clients of a stalled engine are
    /// told to wait.
    pub(super) fn place(
        &self,
        id: ModelId,
        session: Uuid,
        stall_pause: Duration,
    ) -> Result<Placement, Refused> {
        let entry = self.entries.get(&id).ok_or_else(not_served)?;
        if let Some(Withheld::FilesChanged(why)) = &entry.withheld {
            return Err(Refused::Dead(EngineError::FilesChanged(why.clone())));
        }
        let is_open = |place: &Place| {
            let replica = &entry.replicas[place.device];
            replica.reload_pause().is_none() && replica.steps.stalled.is_none()
        };
        let open: Vec<Place> = self.live_places(id).filter(is_open).collect();
        if let [only] = open[..] {
            return Ok(Placement { device: only.device, also_load: None });
        }
        let open: Vec<PossiblePlace> = open.iter().map(|at| self.candidate(entry, *at)).collect();
        placement::choose(&open, session).ok_or_else(|| {
            let pauses = self.live_places(id).map(|place| &entry.replicas[place.device]);
            let pauses = pauses.map(|replica| replica.reload_pause().unwrap_or(stall_pause));
            Refused::Overloaded { retry_after: pauses.min().unwrap_or(RELOAD_PAUSE) }
        })
    }

    fn candidate(&self, entry: &ModelEntry, place: Place) -> PossiblePlace {
        let usage = self.usage(place);
        let engine = entry.replicas[place.device].engine.as_ref();
        let stats = engine.map(EngineHandle::stats).unwrap_or_default();
        let eviction = &self.devices[place.device].eviction;
        PossiblePlace {
            device: place.device,
            has_model: eviction.accepts_requests(place.model),
            is_loading: usage.phase == LoadPhase::Loading,
            waiting: usage.waiting + stats.waiting,
            running: stats.running,
            has_room: self.has_room(place),
        }
    }

    /// What is to be done next, and on which device.
    pub(super) fn next_action(&mut self) -> Option<(usize, PoolAction)> {
        let mut devices = self.devices.iter_mut().enumerate();
        devices.find_map(|(device, state)| Some((device, state.eviction.next_action()?)))
    }

    /// Removes waiters that have given up, and tells `eviction` how many are left.
    pub(super) fn count_waiters(&mut self, place: Place) {
        let waiters = &mut self.replica(place).waiters;
        waiters.retain(|waiter| !waiter.is_closed());
        let count = waiters.len();
        self.eviction(place).set_waiting(place.model, count);
    }

    /// Takes the waiters of a loaded model, each with its lease.
    pub(super) fn grant_waiting(
        &mut self,
        pool: &Arc<ModelPool>,
        place: Place,
    ) -> Vec<(oneshot::Sender<EngineLease>, EngineLease)> {
        let replica = self.replica(place);
        let engine = replica.engine.clone().expect("invariant: a loaded model has an engine");
        let lease =
            |waiter| (waiter, EngineLease { pool: pool.clone(), place, engine: engine.clone() });
        replica.waiters.drain(..).map(lease).collect()
    }

    /// Turns the waiting requests away and ends the engine, which fails those that run.
    pub(super) fn end_engine(&mut self, pool: &Arc<ModelPool>, place: Place) {
        let replica = self.replica(place);
        replica.waiters.clear();
        let engine = replica.engine.take();
        let eviction = self.eviction(place);
        eviction.set_waiting(place.model, 0);
        if engine.is_some() {
            eviction.begin_unload(place.model);
            pool.clone().unload(place, engine);
        }
    }

    pub(super) fn finish_load(
        &mut self,
        place: Place,
        outcome: Result<LoadedEngine, EngineError>,
    ) -> Result<(), EngineError> {
        self.loads += 1;
        let withheld = self.entry(place.model).withheld.clone();
        let fitting = outcome.and_then(|LoadedEngine { engine, bytes }| {
            if let Some(Withheld::FilesChanged(why)) = withheld {
                return Err(EngineError::FilesChanged(why));
            }
            let eviction = self.eviction(place);
            if !eviction.finish_load(place.model, bytes) {
                return Err(too_large(bytes, eviction.budget()));
            }
            Ok(engine)
        });
        match fitting {
            Ok(engine) => {
                let (entry, served) = (self.entry(place.model), engine.options().max_context);
                if served < entry.model.max_context {
                    // The cache of this load holds less than the configuration allows.
                    Arc::make_mut(&mut entry.model).max_context = served;
                }
                let replica = self.replica(place);
                (replica.engine, replica.failure) = (Some(engine), None);
                Ok(())
            }
            Err(why) => {
                let entry = self.entry(place.model);
                let record = entry.model.qualified.record_id();
                if let Some(withheld) = Withheld::by_load(&why, record) {
                    entry.withheld = Some(withheld);
                }
                self.mark_failed(place, why.clone());
                Err(why)
            }
        }
    }

    /// Turns all waiters away; the model is not loaded again there before `RELOAD_PAUSE` has
    /// passed.
    pub(super) fn mark_failed(&mut self, place: Place, why: EngineError) {
        *self.failures.entry(why.kind()).or_default() += 1;
        if why.is_device_lost() {
            self.lose(place.device);
        }
        let replica = self.replica(place);
        replica.engine = None;
        replica.failure = Some((Instant::now(), why));
        replica.waiters.clear();
        let eviction = self.eviction(place);
        eviction.set_waiting(place.model, 0);
        eviction.mark_unloaded(place.model);
    }

    fn lose(&mut self, device: usize) {
        let lost = &mut self.devices[device];
        if !std::mem::replace(&mut lost.is_lost, true) {
            tracing::error!(device = %lost.name, "a device is lost until this process has ended");
        }
        if self.devices.iter().all(|device| device.is_lost) {
            self.all_lost.cancel();
        }
    }
}

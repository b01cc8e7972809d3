//! The state of the pool for operators and handlers.

use super::eviction::{LoadPhase, ModelUsage};
use super::state::{ModelEntry, PoolDevice, PoolState};
use super::{ModelPool, ServedModel};
use cresset_base::ModelId;
use cresset_engine::{EngineHandle, EngineStats};
use parking_lot::MutexGuard;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One model as operators see it, over all devices.
pub struct ModelView {
    pub model: Arc<ServedModel>,
    /// Those that are loaded, in the order of the devices.
    pub engines: Vec<EngineHandle>,
    /// The furthest phase that it has reached on a device, and sums.
    pub usage: ModelUsage,
    /// The reason why clients are not sent to the model: a load or an engine that failed on each
    /// device and is not tried again yet, requests that failed one after the other, or a step
    /// without an end.
    pub failure: Option<String>,
}

/// One device as operators see it.
pub struct DeviceView {
    pub name: String,
    /// Bytes that its models may take together, and those of them that are free.
    pub budget: u64,
    pub free: u64,
    /// It cannot be used any more before this process has ended.
    pub is_lost: bool,
    /// The numbers of all its engines together.
    pub stats: EngineStats,
}

impl ModelView {
    /// The numbers of its engines together.
    pub fn stats(&self) -> EngineStats {
        self.engines.iter().map(EngineHandle::stats).sum()
    }

    /// One word for the status document.
    pub fn state(&self) -> &'static str {
        match self.usage.phase {
            _ if self.failure.is_some() => "failed",
            LoadPhase::Unloaded => "unloaded",
            LoadPhase::Loading => "loading",
            LoadPhase::Loaded => "loaded",
            LoadPhase::Unloading => "unloading",
        }
    }
}

impl ModelPool {
    /// All models as operators see them, by id.
    pub fn views(self: &Arc<Self>) -> Vec<ModelView> {
        let state = self.with_dead_marked();
        state.entries.values().map(|entry| state.view(entry)).collect()
    }

    pub fn devices(&self) -> Vec<DeviceView> {
        let state = self.state.lock();
        let view = |(number, device): (usize, &PoolDevice)| {
            let replicas = state.entries.values().map(|entry| &entry.replicas[number]);
            DeviceView {
                name: device.name.clone(),
                budget: device.eviction.budget(),
                free: device.eviction.free(),
                is_lost: device.is_lost,
                stats: replicas.filter_map(|one| Some(one.engine.as_ref()?.stats())).sum(),
            }
        };
        state.devices.iter().enumerate().map(view).collect()
    }

    /// The state, in which every engine that has ended by itself is noticed.
    pub(super) fn with_dead_marked(self: &Arc<Self>) -> MutexGuard<'_, PoolState> {
        let mut state = self.state.lock();
        let ids: Vec<ModelId> = state.entries.keys().copied().collect();
        for id in ids {
            self.mark_dead(&mut state, id);
        }
        state
    }

    /// Whether an engine has not finished its step for long.
    pub fn is_stalled(&self) -> bool {
        let state = self.state.lock();
        let mut replicas = state.entries.values().flat_map(|entry| &entry.replicas);
        replicas.any(|replica| replica.steps.stalled.is_some())
    }

    /// Whether a request sent now finds a model that is loaded and not withdrawn or, once some
    /// model was loaded, one that is about to be. Never while an engine is stalled: what stopped
    /// one may stop the others.
    pub fn is_ready(self: &Arc<Self>) -> bool {
        let views = self.views();
        let served = self.state.lock().loads > 0;
        !self.is_stalled()
            && views.iter().any(|view| match view.usage.phase {
                _ if view.failure.is_some() => false,
                LoadPhase::Loaded => true,
                LoadPhase::Loading | LoadPhase::Unloading => served,
                LoadPhase::Unloaded => false,
            })
    }

    /// Engines of the loaded models.
    pub fn engines(&self) -> Vec<EngineHandle> {
        let state = self.state.lock();
        let replicas = state.entries.values().flat_map(|entry| &entry.replicas);
        replicas.filter_map(|replica| replica.engine.clone()).collect()
    }

    /// All models that are served, loaded or not, by id.
    pub fn models(&self) -> Vec<Arc<ServedModel>> {
        self.state.lock().entries.values().map(|entry| entry.model.clone()).collect()
    }

    /// Loads and unloads since the start.
    pub fn load_counts(&self) -> [u64; 2] {
        let state = self.state.lock();
        [state.loads, state.unloads]
    }

    /// Failed loads and engines that ended by themselves since the start, by the kind of the error.
    pub fn failures(&self) -> BTreeMap<&'static str, u64> {
        self.state.lock().failures.clone()
    }
}

impl PoolState {
    pub(super) fn view(&self, entry: &ModelEntry) -> ModelView {
        let withdrawn = entry.ends.withdrawn.then(|| {
            "all its latest requests failed; it is offered again once a request of the node's own \
             was answered"
                .to_owned()
        });
        let withheld = entry.withheld.as_ref().map(|withheld| withheld.why().to_owned());
        ModelView {
            model: entry.model.clone(),
            engines: entry.replicas.iter().filter_map(|replica| replica.engine.clone()).collect(),
            usage: self.usage_of(entry.model.qualified.id()),
            failure: self.failure_of(entry).or(withheld).or(withdrawn),
        }
    }

    /// What failed on the first device, if something did on each that is not lost.
    fn failure_of(&self, entry: &ModelEntry) -> Option<String> {
        let live = self.live_places(entry.model.qualified.id());
        let failures: Option<Vec<String>> =
            live.map(|place| entry.replicas[place.device].failure()).collect();
        let lost = || "all devices are lost".to_owned();
        failures.map(|all| all.into_iter().next().unwrap_or_else(lost))
    }

    fn usage_of(&self, id: ModelId) -> ModelUsage {
        let all: Vec<ModelUsage> = self.places(id).map(|place| self.usage(place)).collect();
        let is_loaded = |usage: &&ModelUsage| usage.phase != LoadPhase::Unloaded;
        let bytes: u64 = all.iter().filter(is_loaded).map(|usage| usage.bytes).sum();
        let phases = [LoadPhase::Loaded, LoadPhase::Loading, LoadPhase::Unloading];
        let reached = |phase: &LoadPhase| all.iter().any(|usage| usage.phase == *phase);
        let mut usage = all[0];
        usage.phase = phases.into_iter().find(reached).unwrap_or(LoadPhase::Unloaded);
        usage.bytes = if bytes == 0 { usage.bytes } else { bytes };
        usage.active = all.iter().map(|usage| usage.active).sum();
        usage.waiting = all.iter().map(|usage| usage.waiting).sum();
        usage
    }
}

//! The state of the pool for operators and handlers.

use super::eviction::{LoadPhase, ModelUsage};
use super::{ModelPool, PoolState, ServedModel};
use crate::engine::EngineHandle;
use crate::ids::ModelId;
use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard};

/// One model as operators see it.
pub struct ModelView {
    pub model: Arc<ServedModel>,
    pub engine: Option<EngineHandle>,
    pub usage: ModelUsage,
    /// The reason why clients are not sent to the model: a load or an engine that failed and is
    /// not tried again yet, requests that failed one after the other, or a step without an end.
    pub failure: Option<String>,
}

impl ModelView {
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

    /// The state, in which every engine that has ended by itself is noticed.
    pub(super) fn with_dead_marked(self: &Arc<Self>) -> MutexGuard<'_, PoolState> {
        let mut state = self.lock();
        let ids: Vec<ModelId> = state.entries.keys().copied().collect();
        for id in ids {
            self.mark_dead(&mut state, id);
        }
        state
    }

    /// Whether an engine has not finished its step for long.
    pub fn is_stalled(&self) -> bool {
        self.lock().entries.values().any(|entry| entry.steps.stalled.is_some())
    }

    /// Whether a request sent now finds a model that is loaded and not withdrawn or, once some
    /// model was loaded, one that is about to be. Never while an engine is stalled: what stopped
    /// one may stop the others.
    pub fn is_ready(self: &Arc<Self>) -> bool {
        let views = self.views();
        let served = self.lock().loads > 0;
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
        self.lock().entries.values().filter_map(|entry| entry.engine.clone()).collect()
    }

    /// All models that are served, loaded or not, by id.
    pub fn models(&self) -> Vec<Arc<ServedModel>> {
        self.lock().entries.values().map(|entry| entry.model.clone()).collect()
    }

    /// Bytes that all models together may take, and how many of them are free.
    pub fn memory(&self) -> [u64; 2] {
        let state = self.lock();
        [state.eviction.budget(), state.eviction.free()]
    }

    /// Loads and unloads since the start.
    pub fn load_counts(&self) -> [u64; 2] {
        let state = self.lock();
        [state.loads, state.unloads]
    }

    /// Failed loads and engines that ended by themselves since the start, by the kind of the error.
    pub fn failures(&self) -> BTreeMap<&'static str, u64> {
        self.lock().failures.clone()
    }
}

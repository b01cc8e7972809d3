//! The use of a loaded model by one request.

use super::ModelPool;
use super::placement::Place;
use cresset_engine::EngineHandle;
use std::sync::Arc;

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

//! Watches whether the engines finish their steps. A step that never ends, in a driver or in a
//! fault of ours, would otherwise leave a node that looks well and answers nobody.

use super::ModelPool;
use super::state::ModelEntry;
use super::step_watch::{StepFinding, StepWatch, pause};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Watches the pool's engines until the pool is dropped, on a thread of its own: one of the
/// runtime's may be what does not go on.
#[expect(clippy::disallowed_methods, reason = "it measures how long steps take")]
pub(super) fn start(pool: &Arc<ModelPool>, patience: Duration) {
    let pool = Arc::downgrade(pool);
    let watch = move || {
        let mut last = Instant::now();
        loop {
            std::thread::sleep(pause(patience));
            let now = Instant::now();
            let Some(pool) = Weak::upgrade(&pool) else { return };
            pool.look_at_steps(now - last, patience);
            last = now;
        }
    };
    std::thread::Builder::new()
        .name("watchdog".into())
        .spawn(watch)
        .expect("the operating system gives the watchdog a thread");
}

impl ModelPool {
    fn look_at_steps(self: &Arc<Self>, passed: Duration, patience: Duration) {
        let mut state = self.with_dead_marked();
        let entries = state.entries.values_mut();
        for (model, replica) in entries.flat_map(|ModelEntry { model, replicas, .. }| {
            replicas.iter_mut().map(|one| (&*model, one))
        }) {
            let name = &model.qualified.manifest().name;
            let Some(engine) = &replica.engine else {
                replica.steps = StepWatch::default();
                continue;
            };
            let found = replica.steps.look(&engine.progress(), passed, patience);
            let why = replica.steps.stalled.as_deref().unwrap_or_default();
            match found {
                StepFinding::Nothing => {}
                StepFinding::Stalls => {
                    tracing::error!(%name, why, "an engine does not finish its step");
                }
                StepFinding::GoesOn => tracing::info!(%name, "an engine finishes its steps again"),
                StepFinding::Hopeless => {
                    tracing::error!(%name, why, "the process ends, to be started again");
                    std::process::abort();
                }
            }
        }
    }
}

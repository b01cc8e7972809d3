//! Has proven what is still open of the models that are loaded, one part after the other, in idle
//! steps of their engines: a longer context, and a record anew before it ends.

#![expect(clippy::disallowed_methods, reason = "a pause follows a fault")]

use crate::{Assembly, NodeError};
use cresset_base::{Clock, ModelId, SystemClock};
use cresset_engine::EngineHandle;
use cresset_pool::{ModelPool, ModelView, ServedModel};
use cresset_qualification::context_proof::next_context_tokens;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Between two looks at what is due.
const PAUSE: Duration = Duration::from_secs(1);
/// Before a release is tried again whose proof could not be run.
const AFTER_FAULT: Duration = Duration::from_hours(1);

/// What is to be proven next of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DueProof {
    /// That prompt and output of this many tokens run.
    Context(u32),
    /// Its record, anew.
    Renewal,
}

/// What proves releases while they are served: the prover, where the program has one.
pub trait Proving: Send + Sync {
    /// Proves one part over the engine that serves, and keeps what it found. Blocking. It keeps
    /// nothing where the engine ends or drains meanwhile.
    fn prove(
        &self,
        assembly: &Assembly,
        served: &ServedModel,
        engine: EngineHandle,
        due: DueProof,
    ) -> Result<(), NodeError>;
}

impl DueProof {
    /// `failed` is the length that failed, `goal` the longest that the engine runs. Ages are in
    /// seconds.
    fn of(proven: u32, failed: Option<u32>, goal: u32, [age, max_age]: [u64; 2]) -> Option<Self> {
        if age * 3 >= max_age * 2 {
            return Some(Self::Renewal);
        }
        let next = next_context_tokens(proven, goal)?;
        failed.is_none_or(|failed| next < failed).then_some(Self::Context(next))
    }
}

pub(super) struct BackgroundProofs {
    assembly: Assembly,
    pool: Arc<ModelPool>,
    prover: Arc<dyn Proving>,
    /// When a proof could not be run.
    faults: BTreeMap<ModelId, Instant>,
}

impl BackgroundProofs {
    /// `None` where the configuration or the program has none.
    pub(super) fn new(assembly: &Assembly, pool: &Arc<ModelPool>) -> Option<Self> {
        let prover = assembly.background_prover()?.clone();
        let (assembly, pool) = (assembly.clone(), pool.clone());
        Some(Self { assembly, pool, prover, faults: BTreeMap::new() })
    }

    pub(super) async fn run(mut self, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await.is_some() {
            let due = self.pool.views().into_iter().find_map(|view| self.due(view));
            let Some((model, engine, due)) = due else { continue };
            // It ends with its engine, so that nobody waits for the thread.
            let Some(proving) = self.begin(model.clone(), engine, due) else { continue };
            let Some(outcome) = stop.run_until_cancelled(proving).await else { return };
            // One that panicked has dropped its end of the channel.
            if let Err(why) = outcome.map_err(NodeError::new).flatten() {
                let name = &model.qualified.manifest().name;
                tracing::warn!(name, ?due, %why, "a proof in the background could not be run");
                self.faults.insert(model.qualified.id(), Instant::now());
            }
        }
    }

    /// What is due of a model whose engine is idle.
    fn due(&self, view: ModelView) -> Option<(Arc<ServedModel>, EngineHandle, DueProof)> {
        let ModelView { model, engines, failure: None, .. } = view else { return None };
        let engine = engines.into_iter().next()?;
        let stats = engine.stats();
        let qualified = &model.qualified;
        let fault = self.faults.get(&qualified.id());
        if stats.running + stats.waiting > 0 || fault.is_some_and(|at| at.elapsed() < AFTER_FAULT) {
            return None;
        }
        let goal = model.context_goal();
        let max_age = self.assembly.max_age_days.load(Ordering::Relaxed) * 86_400;
        let age = SystemClock.now().seconds().saturating_sub(qualified.proven_at());
        let (proven, failed) = (qualified.qualified_context_tokens(), qualified.failed_context());
        let due = DueProof::of(proven, failed.map(|f| f.tokens), goal, [age, max_age])?;
        Some((model, engine, due))
    }

    /// Proves it on a thread of its own, and takes over what came of it.
    fn begin(
        &self,
        model: Arc<ServedModel>,
        engine: EngineHandle,
        due: DueProof,
    ) -> Option<oneshot::Receiver<Result<(), NodeError>>> {
        let (ended, outcome) = oneshot::channel();
        let (assembly, pool, prover) =
            (self.assembly.clone(), self.pool.clone(), self.prover.clone());
        let prove = move || {
            let proven = prover.prove(&assembly, &model, engine, due);
            take_over(&assembly, &pool, &model);
            // The node may have stopped.
            let _ = ended.send(proven);
        };
        let thread = std::thread::Builder::new().name("proof".into()).spawn(prove);
        thread.is_ok().then_some(outcome)
    }
}

/// Serves the model from now on as its records and proofs are now.
fn take_over(assembly: &Assembly, pool: &Arc<ModelPool>, model: &ServedModel) {
    let (id, manifest) = (model.qualified.id(), model.qualified.manifest());
    let name = &manifest.name;
    match assembly.qualified(manifest, &assembly.host()) {
        Ok(now) => {
            let tokens = now.qualified_context_tokens();
            if tokens > model.qualified.qualified_context_tokens() {
                tracing::info!(name, tokens, "a longer context is proven");
            }
            pool.renew_proof(now);
        }
        Err(why) => {
            if pool.withhold(id, why.to_string()) {
                tracing::error!(name, %why, "a model is not offered any more");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_renewed_from_two_thirds_of_their_age_and_contexts_double() {
        let due = |proven, failed, age| DueProof::of(proven, failed, 9_000, [age, 90]);
        assert_eq!(due(2_048, None, 0), Some(DueProof::Context(4_096)));
        assert_eq!(due(8_192, None, 59), Some(DueProof::Context(9_000)));
        assert_eq!(due(9_000, None, 59), None);
        assert_eq!(due(2_048, Some(8_192), 0), Some(DueProof::Context(4_096)));
        assert_eq!(due(4_096, Some(8_192), 0), None);
        assert_eq!(due(4_096, Some(8_192), 60), Some(DueProof::Renewal));
        assert_eq!(due(9_000, None, 1_000), Some(DueProof::Renewal));
    }
}

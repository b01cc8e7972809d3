//! Everything that requests need from the node, shared by all of them and by every surface.

use super::error::RequestError;
use super::live::{LiveRequests, StopRequest};
use super::rate_limit::RateLimit;
use super::recent_errors::RecentErrors;
use crate::clock::Clock;
use crate::config::{Config, Plan};
use crate::engine::EngineHandle;
use crate::ids::ModelId;
use crate::ledger::{Command, Outcome, RequestKey, RequestRecord};
use crate::metrics::Metrics;
use crate::pool::{ModelPool, ServedModel};
use crate::store::Store;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio_util::task::TaskTracker;

/// The parts of the node that its requests and surfaces use. There is one for each node.
pub struct Services {
    pub config: Config,
    pub store: Store,
    pub clock: Arc<dyn Clock>,
    pub metrics: Metrics,
    pub pool: Arc<ModelPool>,
    pub live: LiveRequests,
    pub rate_limit: RateLimit,
    pub recent_errors: RecentErrors,
    /// The lifecycle tasks, one for each live request.
    pub tasks: TaskTracker,
    draining: AtomicBool,
}

impl Services {
    pub fn new(config: Config, store: Store, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self {
            pool: ModelPool::new(&config.engine, config.model_bytes()),
            rate_limit: RateLimit::new(&config),
            config,
            store,
            clock,
            metrics: Metrics::default(),
            live: LiveRequests::default(),
            recent_errors: RecentErrors::default(),
            tasks: TaskTracker::new(),
            draining: AtomicBool::new(false),
        })
    }

    /// The models that a plan may use now, by id. A model that failed lately is left out.
    pub fn models_of(&self, plan: &Plan) -> Vec<Arc<ServedModel>> {
        let available = self.pool.views().into_iter().filter(|view| view.failure.is_none());
        available.map(|view| view.model).filter(|model| allows(plan, model)).collect()
    }

    /// The model, if the plan may use it.
    pub fn model_of(&self, plan: &Plan, id: ModelId) -> Option<Arc<ServedModel>> {
        self.pool.get(id).filter(|model| allows(plan, model))
    }

    /// Whether a request sent now can be expected to run.
    pub fn is_ready(&self) -> bool {
        !self.is_draining() && self.store.healthy() && self.pool.is_ready()
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Admits nothing from now on, gives running requests the configured grace, then stops the
    /// others uncharged. Returns when the end of every request is in the ledger.
    pub async fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        // A request that passed the check just before is refused by the engine.
        self.pool.engines().iter().for_each(EngineHandle::drain);
        self.tasks.close();
        let grace = Duration::from_secs(self.config.requests.drain_grace_seconds);
        if tokio::time::timeout(grace, self.tasks.wait()).await.is_err() {
            self.live.shut_down();
            self.tasks.wait().await;
        }
    }
}

fn allows(plan: &Plan, model: &ServedModel) -> bool {
    let (id, name) = (model.qualified.id().to_string(), &model.qualified.manifest().name);
    plan.models.as_ref().is_none_or(|models| models.iter().any(|m| m == name || *m == id))
}

/// The longest prompt and output that a plan allows a model, all in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLimits {
    /// The model's own context.
    pub model_context: u32,
    /// The context that was qualified, or the shorter one that the configuration serves.
    pub qualified_context: u32,
    pub plan_context: u32,
    /// The lowest of the three.
    pub context: u32,
    pub max_output: u32,
}

impl TokenLimits {
    pub fn of(model: &ServedModel, plan: &Plan) -> Self {
        let limits = model.qualified.manifest().limits;
        let served = u32::try_from(model.max_context).unwrap_or(u32::MAX);
        let qualified = model.qualified.qualified_context_tokens().min(served);
        Self::lowest(limits.model_context_tokens, qualified, plan, limits.max_output_tokens)
    }

    fn lowest(model: u32, qualified: u32, plan: &Plan, max_output: u32) -> Self {
        let plan_context = plan.context_tokens.unwrap_or(model);
        let context = model.min(qualified).min(plan_context);
        let plan_output = plan.max_output_tokens.unwrap_or(max_output);
        Self {
            model_context: model,
            qualified_context: qualified,
            plan_context,
            context,
            max_output: max_output.min(plan_output).min(context),
        }
    }
}

/// Cancels a request and returns its record as it then is: ended, or still ending if that took
/// longer than the configured wait.
pub async fn cancel(
    services: &Services,
    record: RequestRecord,
) -> Result<RequestRecord, RequestError> {
    if record.latest().state.is_terminal() {
        return Ok(record);
    }
    let key = record.key;
    let flagged = match services.store.submit(Command::RequestCancel { key }).await? {
        Outcome::Request(record) | Outcome::AlreadyResolved(record) => record,
        _ => reread(services, &key).await?,
    };
    let live = services.live.get(&key).filter(|_| !flagged.latest().state.is_terminal());
    if let Some(live) = live {
        live.ask_to_stop(StopRequest::Cancelled);
        let wait = Duration::from_millis(services.config.requests.cancel_wait_milliseconds);
        // Running out of time is no error: the record says that the request is still ending.
        let _ = tokio::time::timeout(wait, live.ended()).await;
    }
    reread(services, &key).await
}

async fn reread(services: &Services, key: &RequestKey) -> Result<RequestRecord, RequestError> {
    let record = services.store.read().await?.request(key).await?;
    record.ok_or(RequestError::Ledger(crate::ledger::Refusal::RequestNotFound))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_context_counts() {
        let check = |plan: (Option<u32>, Option<u32>), qualified: u32, expect: (u32, u32, u32)| {
            let plan =
                Plan { context_tokens: plan.0, max_output_tokens: plan.1, ..Plan::default() };
            let limits = TokenLimits::lowest(8192, qualified, &plan, 4096);
            assert_eq!((limits.plan_context, limits.context, limits.max_output), expect);
        };
        check((None, None), 8192, (8192, 8192, 4096));
        check((None, None), 2048, (8192, 2048, 2048));
        check((Some(1000), None), 2048, (1000, 1000, 1000));
        check((Some(100_000), Some(10)), 8192, (100_000, 8192, 10));
    }
}

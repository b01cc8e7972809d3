//! The running node as its surfaces see it: configuration, ledger, models, live requests.

use super::live::Hub;
use super::rate_limit::{GuessFuse, RateFuse};
use super::recent_errors::Faults;
use crate::clock::Clock;
use crate::config::{Config, Plan};
use crate::engine::{EngineHandle, EngineStats};
use crate::ids::{AccountId, CredentialId, ModelId};
use crate::metrics::{EngineSample, Metrics};
use crate::pool::{ModelPool, ServedModel};
use crate::store::Store;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio_util::task::TaskTracker;

pub struct Node {
    pub config: Config,
    pub store: Store,
    pub clock: Arc<dyn Clock>,
    pub metrics: Metrics,
    pub fuse: RateFuse,
    pub guesses: GuessFuse,
    pub hub: Hub,
    pub pool: Arc<ModelPool>,
    pub faults: Faults,
    /// The tasks that own requests.
    pub drives: TaskTracker,
    draining: AtomicBool,
}

impl Node {
    pub fn new(config: Config, store: Store, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self {
            fuse: RateFuse::new(&config),
            guesses: GuessFuse::new(config.http.failed_auth_per_minute),
            pool: ModelPool::new(&config.engine, config.model_bytes()),
            config,
            store,
            clock,
            metrics: Metrics::default(),
            hub: Hub::default(),
            faults: Faults::default(),
            drives: TaskTracker::new(),
            draining: AtomicBool::new(false),
        })
    }

    /// All models that are served, loaded or not, by id.
    pub fn models(&self) -> Vec<Arc<ServedModel>> {
        self.pool.models()
    }

    /// The models a plan may use now, by id. One that failed lately is not available.
    pub fn models_of(&self, plan: &Plan) -> Vec<Arc<ServedModel>> {
        let available = self.pool.views().into_iter().filter(|view| view.failure.is_none());
        available.map(|view| view.model).filter(|model| allows(plan, model)).collect()
    }

    pub fn model_of(&self, plan: &Plan, id: ModelId) -> Option<Arc<ServedModel>> {
        self.pool.get(id).filter(|model| allows(plan, model))
    }

    /// Whether a request sent now can be expected to run.
    pub fn ready(&self) -> bool {
        !self.is_draining() && self.store.healthy() && self.pool.is_ready()
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Admits nothing from now on, gives running requests the configured grace, then ends the rest
    /// uncharged. Returns when every request has its end in the ledger.
    pub async fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        // A request that passed the check before it changed is refused at the engine's door.
        self.pool.engines().iter().for_each(EngineHandle::drain);
        self.drives.close();
        let grace = Duration::from_secs(self.config.requests.drain_grace_seconds);
        if tokio::time::timeout(grace, self.drives.wait()).await.is_err() {
            self.hub.end_all();
            self.drives.wait().await;
        }
    }

    /// To be called once a revocation is durable: ends what runs under the credential.
    pub fn revoked(&self, credential: CredentialId) {
        self.hub.end_credential(credential);
    }

    /// To be called once a suspension is durable: ends what the account runs.
    pub fn suspended(&self, account: AccountId) {
        self.hub.end_account(account);
    }

    /// The metrics, sampled now.
    pub async fn metrics_text(&self) -> String {
        let ledger = self.store.stats().await;
        for view in self.pool.views() {
            let stats = view.engine.as_ref().map(EngineHandle::stats).unwrap_or_default();
            self.metrics.sample_engine(
                &view.model.qualified.manifest().name,
                &sample(&stats, view.engine.is_some()),
            );
        }
        let [budget, free] = self.pool.memory();
        let [loads, unloads] = self.pool.load_counts();
        self.metrics.sample_pool(budget - free, loads, unloads);
        self.metrics.sample_model_failures(&self.pool.failures());
        self.metrics.sample_node(self.hub.len(), self.store.healthy(), self.ready());
        let oldest = Duration::from_millis(ledger.oldest_reservation_ms);
        self.metrics.sample_ledger(ledger.violations, oldest, &ledger.releases);
        self.metrics.text()
    }
}

fn sample(stats: &EngineStats, loaded: bool) -> EngineSample {
    EngineSample {
        loaded,
        running: stats.running,
        waiting: stats.waiting,
        blocks_total: stats.blocks_total,
        blocks_used: stats.blocks_used,
        prefix_hit_tokens: stats.prefix_hit_tokens,
        preemptions: stats.preemptions,
        stops: stats.stops,
        late_frees: stats.late_frees,
        tokens_per_second: stats.tokens_per_second,
    }
}

fn allows(plan: &Plan, model: &ServedModel) -> bool {
    let (id, name) = (model.qualified.id().to_string(), &model.qualified.manifest().name);
    plan.models.as_ref().is_none_or(|models| models.iter().any(|m| m == name || *m == id))
}

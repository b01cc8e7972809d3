//! The running node as its surfaces see it: configuration, ledger, loaded models, live requests.

use super::fuse::{GuessFuse, RateFuse};
use super::hub::Hub;
use crate::catalogue::QualifiedModel;
use crate::clock::Clock;
use crate::config::{Config, Plan};
use crate::engine::EngineHandle;
use crate::ids::{AccountId, CredentialId, ModelId};
use crate::metrics::{EngineSample, Metrics};
use crate::store::Store;
use crate::text::TextModel;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio_util::task::TaskTracker;

/// A model that can be used now: proven, its text side and its engine.
pub struct LoadedModel {
    pub qualified: QualifiedModel,
    pub text: Arc<TextModel>,
    pub engine: EngineHandle,
}

pub struct Node {
    pub config: Config,
    pub store: Store,
    pub clock: Arc<dyn Clock>,
    pub metrics: Metrics,
    pub fuse: RateFuse,
    pub guesses: GuessFuse,
    pub hub: Hub,
    /// The tasks that own requests.
    pub drives: TaskTracker,
    models: RwLock<BTreeMap<ModelId, Arc<LoadedModel>>>,
    draining: AtomicBool,
}

impl Node {
    pub fn new(config: Config, store: Store, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self {
            fuse: RateFuse::new(&config),
            guesses: GuessFuse::new(config.http.failed_auth_per_minute),
            config,
            store,
            clock,
            metrics: Metrics::default(),
            hub: Hub::default(),
            drives: TaskTracker::new(),
            models: RwLock::default(),
            draining: AtomicBool::new(false),
        })
    }

    /// Puts a model into service, in place of one with the same id. Requests of the old one finish on it.
    pub fn insert_model(&self, model: LoadedModel) {
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        models.insert(model.qualified.id(), Arc::new(model));
    }

    /// Takes a model out of service. Its requests finish.
    pub fn remove_model(&self, id: ModelId) -> Option<Arc<LoadedModel>> {
        self.models.write().unwrap_or_else(PoisonError::into_inner).remove(&id)
    }

    /// All loaded models, by id.
    pub fn models(&self) -> Vec<Arc<LoadedModel>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// The models a plan may use, by id. One whose engine has died is not available.
    pub fn models_of(&self, plan: &Plan) -> Vec<Arc<LoadedModel>> {
        self.models().into_iter().filter(|model| model.engine.is_alive() && allows(plan, model)).collect()
    }

    pub fn model_of(&self, plan: &Plan, id: ModelId) -> Option<Arc<LoadedModel>> {
        let found = self.models.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned();
        found.filter(|model| model.engine.is_alive() && allows(plan, model))
    }

    /// Whether a request sent now can be expected to run.
    pub fn ready(&self) -> bool {
        !self.is_draining() && self.store.healthy() && self.models().iter().any(|model| model.engine.is_alive())
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Admits nothing from now on, gives running requests the configured grace, then ends the rest uncharged. Returns when
    /// every request has its end in the ledger.
    pub async fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        // A request that passed the check before it changed is refused at the engine's door.
        self.models().iter().for_each(|model| model.engine.drain());
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
    pub fn metrics_text(&self) -> String {
        for model in self.models() {
            let stats = model.engine.stats();
            let sample = EngineSample {
                running: stats.running,
                waiting: stats.waiting,
                blocks_total: stats.blocks_total,
                blocks_used: stats.blocks_used,
                prefix_hit_tokens: stats.prefix_hit_tokens,
                preemptions: stats.preemptions,
                tokens_per_second: stats.tokens_per_second,
            };
            self.metrics.sample_engine(&model.qualified.manifest().name, &sample);
        }
        self.metrics.sample_node(self.hub.len(), self.store.healthy(), self.ready());
        let vitals = self.store.vitals();
        let oldest = Duration::from_millis(vitals.oldest_reservation_ms);
        self.metrics.sample_ledger(vitals.violations, oldest, &vitals.releases);
        self.metrics.text()
    }
}

fn allows(plan: &Plan, model: &LoadedModel) -> bool {
    let (id, name) = (model.qualified.id().to_string(), &model.qualified.manifest().name);
    plan.models.as_ref().is_none_or(|models| models.iter().any(|m| m == name || *m == id))
}

//! Everything that requests need from the node, shared by all of them and by every surface.

use super::error::RequestError;
use super::live::{LiveRequests, StopRequest};
use super::plans::{Plans, allows};
use super::recent::{RecentErrors, RecentLatencies};
use crate::settings::Plan;
use cresset_base::Clock;
use cresset_catalogue::Catalogue;
use cresset_engine::EngineHandle;
use cresset_ledger::{Command, Outcome, RequestKey, RequestRecord};
use cresset_pool::{ModelPool, ServedModel};
use cresset_store::{RequestSettings, Store};
use cresset_telemetry::Metrics;
use cresset_telemetry::traces::{TraceSettings, Traces};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio_util::task::TaskTracker;

/// The parts from which the services of a node are made.
pub struct ServiceParts {
    pub requests: RequestSettings,
    /// The plans of the start, by name.
    pub plans: BTreeMap<String, Plan>,
    pub traces: TraceSettings,
    pub store: Store,
    pub clock: Arc<dyn Clock>,
    pub catalogue: Catalogue,
    /// It may hold models already.
    pub pool: Arc<ModelPool>,
}

/// The parts of the node that its requests and surfaces use. There is one for each node.
pub struct Services {
    pub requests: RequestSettings,
    pub store: Store,
    pub clock: Arc<dyn Clock>,
    /// The releases of the data folder, and its key, which signs receipts.
    pub catalogue: Catalogue,
    pub metrics: Arc<Metrics>,
    pub traces: Traces,
    pub pool: Arc<ModelPool>,
    pub live: LiveRequests,
    /// The plans in force: a reload replaces those of the start.
    pub plans: Plans,
    pub recent_errors: RecentErrors,
    pub recent_latencies: RecentLatencies,
    /// The lifecycle tasks, one for each live request.
    pub tasks: TaskTracker,
    draining: AtomicBool,
}

impl Services {
    pub fn new(parts: ServiceParts) -> Arc<Self> {
        let ServiceParts { requests, plans, traces, store, clock, catalogue, pool } = parts;
        let metrics = Metrics::default();
        metrics.started_at(clock.now().seconds());
        Arc::new(Self {
            requests,
            pool,
            plans: Plans::new(&plans),
            traces: Traces::start(&traces, "cresset", metrics.spans.clone()),
            store,
            clock,
            catalogue,
            metrics: metrics.into(),
            live: LiveRequests::default(),
            recent_errors: RecentErrors::default(),
            recent_latencies: RecentLatencies::default(),
            tasks: TaskTracker::new(),
            draining: AtomicBool::new(false),
        })
    }

    /// The models that a plan may use now, by id. A model that failed lately is left out.
    pub fn models_of(&self, plan: &Plan) -> Vec<Arc<ServedModel>> {
        let offered = self.offered().into_iter();
        offered.filter(|model| allows(plan, model)).collect()
    }

    /// `models_of` a plan without limits.
    pub(super) fn offered(&self) -> Vec<Arc<ServedModel>> {
        let available = self.pool.views().into_iter().filter(|view| view.failure.is_none());
        available.map(|view| view.model).collect()
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
        let grace = Duration::from_secs(self.requests.drain_grace_seconds);
        self.drain_within(grace).await;
    }

    /// `drain` with another grace.
    pub async fn drain_within(&self, grace: Duration) {
        self.draining.store(true, Ordering::Release);
        // A request that passed the check just before is refused by the engine.
        self.pool.engines().iter().for_each(EngineHandle::drain);
        self.tasks.close();
        if tokio::time::timeout(grace, self.tasks.wait()).await.is_err() {
            self.live.shut_down();
            self.tasks.wait().await;
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
        let wait = Duration::from_millis(services.requests.cancel_wait_milliseconds);
        // Running out of time is no error: the record says that the request is still ending.
        let _ = tokio::time::timeout(wait, live.ended()).await;
    }
    reread(services, &key).await
}

async fn reread(services: &Services, key: &RequestKey) -> Result<RequestRecord, RequestError> {
    let record = services.store.read().await?.request(key).await?;
    record.ok_or(RequestError::Ledger(cresset_ledger::Refusal::RequestNotFound))
}

//! Makes the services of requests and the public surface from a configuration.

use crate::config::Config;
use cresset_api::Api;
use cresset_base::SystemClock;
use cresset_catalogue::Catalogue;
use cresset_pool::{DeviceBudget, ModelPool};
use cresset_request::{ServiceParts, Services};
use cresset_store::Store;
use std::sync::Arc;

/// The services of a node. Without a pool they get an empty one on the CPU.
pub fn services(
    config: &Config,
    store: Store,
    catalogue: Catalogue,
    pool: Option<Arc<ModelPool>>,
) -> Arc<Services> {
    let empty = || ModelPool::new(&config.engine, DeviceBudget::cpu(config.model_bytes()));
    let services = Services::new(ServiceParts {
        requests: config.requests.clone(),
        plans: config.plans.clone(),
        traces: config.traces.clone(),
        store,
        clock: Arc::new(SystemClock),
        catalogue,
        pool: pool.unwrap_or_else(empty),
    });
    let metrics = &services.metrics;
    metrics.kv_block_tokens.set(config.engine.block_size as i64);
    metrics.qualification_max_age.set(config.qualification.max_age_days as i64 * 86_400);
    services
}

/// The public surface of a node.
pub fn api(services: &Arc<Services>, config: &Config) -> Api {
    Api { services: services.clone(), settings: config.api().into() }
}

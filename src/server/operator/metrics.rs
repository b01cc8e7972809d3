//! The node's metrics, sampled when they are asked for.

use crate::engine::{EngineHandle, EngineStats};
use crate::metrics::EngineSample;
use crate::request::Services;
use std::time::Duration;

/// The text that a scrape gets.
pub async fn text(services: &Services) -> String {
    let Services { pool, store, live, metrics, .. } = services;
    let ledger = store.stats().await;
    for view in pool.views() {
        let stats = view.engine.as_ref().map(EngineHandle::stats).unwrap_or_default();
        let name = &view.model.qualified.manifest().name;
        metrics.sample_engine(name, &sample(&stats, view.engine.is_some()));
    }
    let [budget, free] = pool.memory();
    let [loads, unloads] = pool.load_counts();
    metrics.sample_pool(budget - free, loads, unloads);
    metrics.sample_model_failures(&pool.failures());
    metrics.sample_node(live.len(), store.healthy(), services.is_ready());
    let oldest = Duration::from_millis(ledger.oldest_reservation_ms);
    metrics.sample_ledger(ledger.violations, oldest, &ledger.releases);
    metrics.text()
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

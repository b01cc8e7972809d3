//! The node's metrics, sampled when they are asked for.

use super::{Live, gpus};
use cresset_base::UnixMillis;
use cresset_engine::EngineStats;
use cresset_pool::DeviceView;
use cresset_request::Services;
use cresset_telemetry::{DeviceSample, ProcessSample};

/// The text that a scrape gets.
pub async fn text(services: &Services) -> String {
    let Services { pool, store, live, metrics, .. } = services;
    let (ledger, now) = (store.stats().await, store.now().seconds());
    let mut engines = Vec::new();
    for view in pool.views() {
        let name = &view.model.qualified.manifest().name;
        let stats = view.stats();
        metrics.sample_engine(name, !view.engines.is_empty(), &stats);
        let age = now.saturating_sub(view.model.qualified.proven_at());
        metrics.sample_qualification(name, age);
        engines.push(stats);
    }
    metrics.sample_engines(&engines);
    let [loads, unloads] = pool.load_counts();
    let devices: Vec<_> = pool.devices().into_iter().map(sample).collect();
    metrics.sample_pool(&devices, loads, unloads);
    metrics.sample_model_failures(&pool.failures());
    metrics.sample_node(live.len(), store.healthy(), services.is_ready());
    metrics.sample_ledger(&ledger);
    metrics.sample_process(ProcessSample::take());
    metrics.text()
}

fn sample(device: DeviceView) -> DeviceSample {
    let DeviceView { name, budget, free, is_lost, stats } = device;
    let EngineStats { running, waiting, .. } = stats;
    DeviceSample { name, held_bytes: budget - free, is_lost, running, waiting }
}

/// Sets the ages of the last backups and of the last audit, the ends of certificates, and the
/// condition of GPUs.
pub fn sample_care(live: &Live) {
    live.gpus.iter().for_each(|gpu| live.node.metrics.sample_gpu(&gpus::sample(gpu)));
    for (listener, ends_at) in live.start.certificates() {
        live.node.metrics.certificates.set(listener, ends_at);
    }
    let (store, backups) = (&live.node.store, live.files.backups.read());
    let since = |at: u64| store.now().seconds().saturating_sub(at);
    let backups = ["node", "ledger"].map(|kind| (kind, backups[kind]["at"].as_u64().map(since)));
    let audit = store.fully_audited_at().map(UnixMillis::seconds).map(since);
    live.node.metrics.sample_care(backups, audit);
}

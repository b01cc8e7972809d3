//! What the metrics show of the node's state: set when they are asked for.

use super::{By, Metrics};
use cresset_base::EngineStats;
use cresset_store::StoreStats;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Figures of a device that models run on.
#[derive(Clone, Debug)]
pub struct DeviceSample {
    pub name: String,
    /// Bytes of the models that are loaded there.
    pub held_bytes: u64,
    pub is_lost: bool,
    pub running: usize,
    pub waiting: usize,
}

/// The condition of a GPU; values that are not known are absent.
#[derive(Clone, Debug, Default)]
pub struct GpuSample {
    pub name: String,
    pub celsius: Option<u32>,
    pub watts: Option<f64>,
    /// By what has the clock.
    pub hertz: Vec<(&'static str, u64)>,
    /// Whether clocks are lowered, by reason.
    pub slowdowns: Vec<(&'static str, bool)>,
    /// By kind, since the driver was loaded.
    pub memory_errors: Vec<(&'static str, u64)>,
    /// By kind.
    pub remapped_rows: Vec<(&'static str, u32)>,
    pub last_xid: Option<u64>,
}

impl Metrics {
    /// Sets the metrics of a model's engine to its state at a scrape.
    pub fn sample_engine(&self, model: &str, loaded: bool, stats: &EngineStats) {
        let label = &[("model", model.to_owned())];
        self.running.get_or_create(label).set(stats.running as i64);
        self.waiting.get_or_create(label).set(stats.waiting as i64);
        let used = stats.blocks_used as f64 / stats.blocks_total.max(1) as f64;
        self.kv_usage.get_or_create(label).set(used);
        self.throughput.get_or_create(label).set(stats.tokens_per_second);
        self.kv_blocks.get_or_create(label).set(stats.blocks_total as i64);
        let computed = stats.prompt_tokens.saturating_sub(stats.prefix_hit_tokens);
        // The engine counts from its own start, so these counters are set to its totals.
        for (family, total) in [
            (&self.steps, stats.steps),
            (&self.step_tokens, computed + stats.generated_tokens),
            (&self.prefix_queries, stats.prompt_tokens),
            (&self.prefix_hits, stats.prefix_hit_tokens),
            (&self.preemptions, stats.preemptions),
            (&self.draft_tokens, stats.draft_tokens),
            (&self.accepted_tokens, stats.accepted_tokens),
            (&self.stops, stats.stops),
            (&self.late_frees, stats.late_frees),
        ] {
            family.get_or_create(label).inner().store(total, Ordering::Relaxed);
        }
        self.loaded.get_or_create(label).set(loaded.into());
    }

    /// Sets the sums over all engines.
    pub fn sample_engines(&self, engines: &[EngineStats]) {
        let sum = |figure: fn(&EngineStats) -> usize| engines.iter().map(figure).sum::<usize>();
        self.all_running.set(sum(|stats| stats.running) as i64);
        self.all_waiting.set(sum(|stats| stats.waiting) as i64);
        let blocks = sum(|stats| stats.blocks_total);
        self.all_kv_usage.set(sum(|stats| stats.blocks_used) as f64 / blocks.max(1) as f64);
        let block_size = ("block_size", self.kv_block_tokens.get().to_string());
        self.cache_config.clear();
        self.cache_config
            .get_or_create(&[block_size, ("num_gpu_blocks", blocks.to_string())])
            .set(1);
    }

    /// Loads and unloads are totals since the start.
    pub fn sample_pool(&self, devices: &[DeviceSample], loads: u64, unloads: u64) {
        let mut held = 0;
        for DeviceSample { name, held_bytes, is_lost, running, waiting } in devices {
            let label = [("device", name.clone())];
            held += held_bytes;
            self.device_memory.get_or_create(&label).set(*held_bytes as i64);
            self.device_lost.get_or_create(&label).set((*is_lost).into());
            self.device_running.get_or_create(&label).set(*running as i64);
            self.device_waiting.get_or_create(&label).set(*waiting as i64);
        }
        self.model_memory.set(held as i64);
        self.loads.inner().store(loads, Ordering::Relaxed);
        self.unloads.inner().store(unloads, Ordering::Relaxed);
    }

    /// Sets what is known of a GPU's condition.
    pub fn sample_gpu(&self, gpu: &GpuSample) {
        let name = || ("gpu", gpu.name.clone());
        let by = |label, value: &str| [name(), (label, value.to_owned())];
        let set = |family: &By<1, Gauge>, value: i64| {
            family.get_or_create(&[name()]).set(value);
        };
        gpu.celsius.iter().for_each(|now| set(&self.gpu_temperature, (*now).into()));
        gpu.last_xid.iter().for_each(|xid| set(&self.gpu_last_xid, *xid as i64));
        if let Some(watts) = gpu.watts {
            self.gpu_power.get_or_create(&[name()]).set(watts);
        }
        for (clock, hertz) in &gpu.hertz {
            self.gpu_clocks.get_or_create(&by("clock", clock)).set(*hertz as i64);
        }
        for (kind, errors) in &gpu.memory_errors {
            let counter = self.gpu_memory_errors.get_or_create(&by("kind", kind));
            counter.inner().store(*errors, Ordering::Relaxed);
        }
        for (reason, is_slowed) in &gpu.slowdowns {
            self.gpu_slowdowns.get_or_create(&by("reason", reason)).set((*is_slowed).into());
        }
        for (kind, rows) in &gpu.remapped_rows {
            self.gpu_remapped_rows.get_or_create(&by("kind", kind)).set((*rows).into());
        }
    }

    /// Sets the totals since the start, by the kind of the error.
    pub fn sample_model_failures(&self, failures: &BTreeMap<&'static str, u64>) {
        tell_totals(&self.model_failures, "kind", failures);
    }

    pub fn sample_node(&self, open_reservations: usize, audit_ok: bool, ready: bool) {
        self.open_reservations.set(open_reservations as i64);
        self.audit_ok.set(audit_ok.into());
        self.ready.set(ready.into());
    }

    /// Sets the age of a model's qualification, seconds.
    pub fn sample_qualification(&self, model: &str, age: u64) {
        self.qualification_age.get_or_create(&[("model", model.to_owned())]).set(age as i64);
    }

    /// Sets the ages of the last backups, by what they hold, and of the last audit of everything;
    /// seconds, `None` where none is known.
    pub fn sample_care(&self, backups: [(&'static str, Option<u64>); 2], audit: Option<u64>) {
        for (kind, age) in backups {
            if let Some(age) = age {
                let label = &[("kind", kind.to_owned())];
                self.backup_age.get_or_create(label).set(age as i64);
            }
        }
        if let Some(age) = audit {
            let label = &[("covered", "everything".to_owned())];
            self.audit_age.get_or_create(label).set(age as i64);
        }
    }

    /// Sets what the ledger has counted since the start of the node, and its sizes.
    pub fn sample_ledger(&self, ledger: &StoreStats) {
        self.violations.inner().store(ledger.violations, Ordering::Relaxed);
        let oldest = Duration::from_millis(ledger.oldest_reservation_ms);
        self.oldest_reservation.set(oldest.as_secs_f64());
        tell_totals(&self.releases, "cause", &ledger.releases);
        tell_totals(&self.budget_alerts, "budget", &ledger.budget_alerts);
        self.disk_free.set(ledger.free_bytes.unwrap_or_default() as i64);
        for (file, bytes) in &ledger.file_bytes {
            let label = &[("file", (*file).to_owned())];
            self.ledger_files.get_or_create(label).set(*bytes as i64);
        }
    }
}

/// Sets counters to totals that are counted elsewhere.
fn tell_totals(family: &By<1, Counter>, label: &'static str, totals: &BTreeMap<&'static str, u64>) {
    for (value, count) in totals {
        let counter = family.get_or_create(&[(label, (*value).to_owned())]);
        counter.inner().store(*count, Ordering::Relaxed);
    }
}

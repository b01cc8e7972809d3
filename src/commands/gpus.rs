//! The condition of a node's GPUs, for `cresset status` and for metrics.

use cresset_kernels::gpu::{GpuSensor, RemappedRows, Slowdown};
use cresset_telemetry::GpuSample;
use serde_json::{Value, json};

/// A GPU whose driver tells its condition, with its name, such as `cuda:0`.
pub type WatchedGpu = (String, GpuSensor);

/// What the status document tells of a GPU; null where its driver does not tell it.
pub(super) fn of_gpu((name, sensor): &WatchedGpu) -> Value {
    let health = sensor.read();
    let names = |all: &Vec<Slowdown>| all.iter().map(|one| one.name()).collect::<Vec<_>>();
    json!({
        "name": name,
        "condition": health.to_string(),
        "concerns": health.concerns(),
        "celsius": health.celsius,
        "watts": health.watts,
        "sm_mhz": health.sm_mhz,
        "memory_mhz": health.memory_mhz,
        "slowed_by": health.slowdowns.as_ref().map(names),
        "corrected_errors": health.corrected_errors,
        "uncorrected_errors": health.uncorrected_errors,
        "remapped_rows": health.remapped.map(|rows| json!({
            "corrected": rows.corrected,
            "uncorrected": rows.uncorrected,
            "pending": rows.is_pending,
            "failed": rows.has_failed,
        })),
        "last_xid": health.last_xid,
    })
}

pub(super) fn sample((name, sensor): &WatchedGpu) -> GpuSample {
    let health = sensor.read();
    let hertz = |mhz: Option<u32>| mhz.map(|mhz| u64::from(mhz) * 1_000_000);
    let slows = |all: &Vec<Slowdown>| {
        Slowdown::ALL.iter().map(|(one, _)| (one.name(), all.contains(one))).collect()
    };
    GpuSample {
        name: name.to_owned(),
        celsius: health.celsius,
        watts: health.watts,
        hertz: known([("sm", hertz(health.sm_mhz)), ("memory", hertz(health.memory_mhz))]),
        slowdowns: health.slowdowns.as_ref().map(slows).unwrap_or_default(),
        memory_errors: known([
            ("corrected", health.corrected_errors),
            ("uncorrected", health.uncorrected_errors),
        ]),
        remapped_rows: health.remapped.map(of_rows).unwrap_or_default(),
        last_xid: health.last_xid,
    }
}

fn known<const N: usize>(all: [(&'static str, Option<u64>); N]) -> Vec<(&'static str, u64)> {
    all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn of_rows(rows: RemappedRows) -> Vec<(&'static str, u32)> {
    let RemappedRows { corrected, uncorrected, is_pending, has_failed } = rows;
    let states = [("pending", is_pending.into()), ("failed", has_failed.into())];
    [[("corrected", corrected), ("uncorrected", uncorrected)], states].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_kernels::gpu::GpuHealth;
    use cresset_telemetry::Metrics;

    #[test]
    fn a_gpus_condition_is_told_as_far_as_it_is_known() {
        let told = |health: &GpuHealth| -> (Value, Vec<String>) {
            let copy = health.clone();
            let gpu = ("cuda:1".to_owned(), GpuSensor::new(move || copy.clone()));
            let metrics = Metrics::default();
            metrics.sample_gpu(&sample(&gpu));
            let text = metrics.text();
            let own = text.lines().filter(|line| line.starts_with("cresset_gpu_"));
            (of_gpu(&gpu), own.map(str::to_owned).collect())
        };
        let (document, metrics) = told(&GpuHealth::default());
        assert_eq!(metrics, [""; 0], "what is not known is not told as 0");
        assert_eq!((&document["celsius"], &document["slowed_by"]), (&Value::Null, &Value::Null));
        assert_eq!(
            (&document["condition"], &document["concerns"]),
            (&json!("it tells nothing"), &json!([]))
        );
        let (document, metrics) = told(&GpuHealth {
            celsius: Some(91),
            watts: Some(312.5),
            sm_mhz: Some(1980),
            memory_mhz: None,
            slowdowns: Some(vec![Slowdown::Heat]),
            corrected_errors: Some(12),
            uncorrected_errors: Some(3),
            remapped: Some(RemappedRows { is_pending: true, ..RemappedRows::default() }),
            last_xid: Some(79),
        });
        assert_eq!(document["slowed_by"], json!(["heat"]));
        assert_eq!(document["remapped_rows"]["pending"], true);
        assert_eq!(document["concerns"].as_array().unwrap().len(), 4);
        for line in [
            "cresset_gpu_temperature_celsius{gpu=\"cuda:1\"} 91",
            "cresset_gpu_power_watts{gpu=\"cuda:1\"} 312.5",
            "cresset_gpu_clock_hertz{gpu=\"cuda:1\",clock=\"sm\"} 1980000000",
            "cresset_gpu_slowdown{gpu=\"cuda:1\",reason=\"heat\"} 1",
            "cresset_gpu_slowdown{gpu=\"cuda:1\",reason=\"power_cap\"} 0",
            "cresset_gpu_memory_errors_total{gpu=\"cuda:1\",kind=\"uncorrected\"} 3",
            "cresset_gpu_remapped_rows{gpu=\"cuda:1\",kind=\"pending\"} 1",
            "cresset_gpu_last_xid{gpu=\"cuda:1\"} 79",
        ] {
            assert!(metrics.iter().any(|told| told == line), "{line} in {metrics:#?}");
        }
        assert!(!metrics.iter().any(|told| told.contains("clock=\"memory\"")));
    }
}

//! Assembles a node: configuration, device, ledger, qualified models, pool, listeners, in this
//! order. Each part is decided once and handed down.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod background_proofs;
pub mod cluster;
pub mod config;
#[cfg(feature = "console")]
mod console;
mod device;
mod draft_release;
mod embed;
pub mod files;
#[cfg(feature = "gateway")]
mod gateway;
#[cfg(feature = "console")]
mod handover;
mod launch;
pub mod ledger;
mod listeners;
mod load;
mod models;
mod open_files;
pub mod private_files;
mod recheck;
mod release_files;
mod reload;
mod running;
mod services;
mod start_event;
mod starting;

pub use background_proofs::{DueProof, Proving};
pub use device::ComputeDevice;
pub use embed::{Client, Node, NodeBuilder};
pub use launch::PortFallback;
pub use load::{Checked, GpuMemory, RunnerSize, cpu_context_bytes};
pub use models::{Servable, cannot_load};
pub use open_files::limited;
pub use release_files::{card, inspect, text};
pub use running::RunningNode;
pub use services::{api, services};
pub use start_event::StartEvent;

pub use cresset_kernels::gpu::{GpuHealth, GpuSensor};
pub use cresset_kernels::instruction_set;

use crate::config::{Config, ConfigSource};
use cresset_client::ClientError;
use cresset_engine::EngineSettings;
use cresset_engine::KvTypeSetting;
use cresset_kernels::gpu::Properties;
use cresset_kernels::{Compute, use_instruction_set};
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The reason why a node could not be assembled, and what its operator can do about it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct NodeError {
    pub message: String,
    pub remedy: Option<String>,
}

impl NodeError {
    pub fn new(message: impl Display) -> Self {
        Self { message: message.to_string(), remedy: None }
    }

    /// `asked` is for a part that this program was built without.
    pub fn without(feature: &str, asked: &str) -> Self {
        Self::new(format!("{asked}, and this program was built without the feature `{feature}`"))
            .remedy(format!("build it with `--features {feature}`, or leave that out"))
    }

    pub fn remedy(self, remedy: impl Display) -> Self {
        Self { remedy: Some(remedy.to_string()), ..self }
    }
}

impl From<ClientError> for NodeError {
    fn from(ClientError { what, remedy }: ClientError) -> Self {
        Self { message: what, remedy }
    }
}

impl From<std::io::Error> for NodeError {
    fn from(error: std::io::Error) -> Self {
        Self::new(error)
    }
}

/// The parts that are known before anything is opened: a node is assembled from them, and models
/// are qualified with them.
#[derive(Clone)]
pub struct Assembly {
    pub data_dir: PathBuf,
    pub config: Config,
    /// The first device that models run on, on which they are qualified.
    pub device: ComputeDevice,
    /// Further ones of the same kind.
    further_devices: Vec<ComputeDevice>,
    /// `qualification.max_age_days`, which a running node takes over, for all clones.
    max_age_days: Arc<AtomicU64>,
    /// Where the configuration came from, if it can be read again.
    pub source: Option<ConfigSource>,
    /// What proves releases while they are served, if the program has it.
    pub prover: Option<Arc<dyn Proving>>,
}

/// Whether activations of the configured width would be computed with.
fn check_activations(engine: &EngineSettings, gpu: Option<&Properties>) -> Result<(), String> {
    if engine.activations == 16 {
        return Ok(());
    }
    if engine.dequantise {
        return Err("engine.activations = 8 is for weights that stay quantised".into());
    }
    if let Some(Properties { name, capability: (major, minor), .. }) = gpu {
        if gpu.is_some_and(Properties::multiplies_codes) {
            return Ok(());
        }
        return Err(format!(
            "engine.activations = 8 is for GPUs of compute capability 8.9 and later, and {name} has \
             {major}.{minor}"
        ));
    }
    let bytes = Compute::new(1).with_byte_activations();
    bytes.map(drop).map_err(|why| format!("engine.activations = 8 cannot be used: {why}"))
}

/// Whether keys and values would be kept in the configured type.
fn check_kv_type(engine: &EngineSettings, on_cpu: bool) -> Result<(), &'static str> {
    match engine.kv_dtype {
        KvTypeSetting::Fp8 if on_cpu => Err("engine.kv_dtype = fp8 is for GPUs"),
        KvTypeSetting::Fp8 if engine.dequantise => {
            Err("engine.kv_dtype = fp8 goes with bf16, and engine.dequantise computes in f32")
        }
        _ => Ok(()),
    }
}

impl Assembly {
    /// Decides the device. Fails when the configuration names a device that cannot be used.
    pub fn new(data_dir: PathBuf, config: Config) -> Result<Self, NodeError> {
        if cfg!(not(feature = "telemetry")) && config.traces.endpoint.is_some() {
            return Err(NodeError::without("telemetry", "traces.endpoint is set"));
        }
        let (device, further_devices) = ComputeDevice::choose_all(&config.engine)?;
        config.engine.instruction_set.wanted().map_or(Ok(()), use_instruction_set).map_err(
            |why| NodeError::new(why).remedy("set engine.instruction_set to one of these, or auto"),
        )?;
        check_activations(&config.engine, device.properties())
            .map_err(|why| NodeError::new(why).remedy("set engine.activations to 16"))?;
        check_kv_type(&config.engine, device.properties().is_none())
            .map_err(|why| NodeError::new(why).remedy("set engine.kv_dtype to auto"))?;
        let max_age_days = Arc::new(config.qualification.max_age_days.into());
        Ok(Self {
            data_dir,
            config,
            device,
            further_devices,
            max_age_days,
            source: None,
            prover: None,
        })
    }

    /// What proves releases while they are served, unless the configuration has that off.
    fn background_prover(&self) -> Option<&Arc<dyn Proving>> {
        self.prover.as_ref().filter(|_| self.config.qualification.background)
    }

    /// Everything that models run on.
    pub fn devices(&self) -> impl Iterator<Item = &ComputeDevice> {
        std::iter::once(&self.device).chain(&self.further_devices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_of_eight_bits_are_for_gpus_that_multiply_them() {
        let gpu = |capability| Properties {
            name: "NVIDIA RTX".into(),
            capability,
            multiprocessors: 128,
            shared_bytes: 99 << 10,
            memory_bytes: 24 << 30,
            versions: String::new(),
            warp_groups: false,
        };
        let settings =
            |dequantise| EngineSettings { activations: 8, dequantise, ..EngineSettings::default() };
        let check = |dequantise, capability| {
            check_activations(&settings(dequantise), Some(&gpu(capability)))
        };
        for capability in [(8, 9), (9, 0), (12, 0)] {
            assert_eq!(check(false, capability), Ok(()));
        }
        let refused = "engine.activations = 8 is for GPUs of compute capability 8.9 and later, and \
                       NVIDIA RTX has 8.6";
        assert_eq!(check(false, (8, 6)), Err(refused.into()));
        assert!(check(true, (9, 0)).is_err());
        assert_eq!(check_activations(&EngineSettings::default(), Some(&gpu((8, 0)))), Ok(()));
    }

    #[test]
    fn a_cache_of_eight_bits_is_for_gpus_that_compute_in_bf16() {
        let check = |kv_dtype, dequantise, on_cpu| {
            let engine = EngineSettings { kv_dtype, dequantise, ..EngineSettings::default() };
            check_kv_type(&engine, on_cpu).is_ok()
        };
        assert!(check(KvTypeSetting::Fp8, false, false));
        assert!(!check(KvTypeSetting::Fp8, true, false));
        assert!(!check(KvTypeSetting::Fp8, false, true));
        for (dequantise, on_cpu) in [(false, false), (true, false), (false, true)] {
            assert!(check(KvTypeSetting::Auto, dequantise, on_cpu));
        }
    }
}

//! The device that models run on: what the configuration asks for, and what this machine and this
//! build have.

use super::NodeError;
use crate::config::{DeviceSetting, cache_dir};
use crate::engine::EngineError;
use cresset_kernels::gpu::{self, Gpu, Properties};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The device that models run on. It is decided once, at the start, and handed down: a second look
/// at the machine could find another one.
#[derive(Clone, Debug)]
pub enum ComputeDevice {
    Cpu {
        /// The reason why no GPU is used, when this build supports GPUs and the configuration
        /// would have taken one.
        no_gpu: Option<String>,
    },
    Gpu {
        number: usize,
        properties: Properties,
    },
}

impl ComputeDevice {
    /// Fails when the configuration names a GPU that cannot be used.
    pub fn choose(setting: &DeviceSetting) -> Result<Self, NodeError> {
        let (number, required) = match *setting {
            DeviceSetting::Cpu => return Ok(Self::Cpu { no_gpu: None }),
            DeviceSetting::Auto => (0, false),
            DeviceSetting::Cuda(number) => (number, true),
        };
        match gpu::probe(number) {
            Ok(properties) => Ok(Self::Gpu { number, properties }),
            Err(why) if required => {
                let what = format!("engine.device is \"cuda:{number}\", but {why}");
                Err(NodeError::new(what).remedy("or set engine.device to \"cpu\""))
            }
            Err(why) => Ok(Self::Cpu { no_gpu: gpu::BUILT.then(|| why.to_string()) }),
        }
    }

    /// The GPU's number; `None` on the CPU.
    pub fn number(&self) -> Option<usize> {
        match self {
            Self::Cpu { .. } => None,
            Self::Gpu { number, .. } => Some(*number),
        }
    }

    /// The GPU's properties; `None` on the CPU.
    pub fn properties(&self) -> Option<&Properties> {
        match self {
            Self::Cpu { .. } => None,
            Self::Gpu { properties, .. } => Some(properties),
        }
    }

    /// The algorithms that products were measured to be computed fastest with, as digests; none
    /// on the CPU, where each has one.
    pub fn products(&self) -> BTreeSet<String> {
        self.properties().map(|found| gpu::chosen_products(&cache_dir(), found)).unwrap_or_default()
    }

    /// The GPU, ready for work; `None` on the CPU.
    pub fn open(&self) -> Result<Option<Arc<dyn Gpu>>, EngineError> {
        let Self::Gpu { number, .. } = self else { return Ok(None) };
        let options =
            gpu::DeviceOptions { folder: Some(cache_dir()), ..gpu::DeviceOptions::default() };
        gpu::open_with(*number, &options)
            .map(Some)
            .map_err(|error| EngineError::NotLoaded(error.to_string()))
    }

    /// One sentence for people that follows "models run". `None` on the CPU of a machine or a
    /// build from which no GPU was expected.
    pub fn sentence(&self) -> Option<String> {
        match self {
            Self::Cpu { no_gpu } => no_gpu.as_ref().map(|why| format!("on the CPU: {why}")),
            Self::Gpu { number, properties } => {
                let Properties { name, capability: (major, minor), memory_bytes, versions, .. } =
                    properties;
                let mib = memory_bytes >> 20;
                Some(format!("on cuda:{number}: {name}, sm_{major}{minor}, {mib} MiB, {versions}"))
            }
        }
    }
}

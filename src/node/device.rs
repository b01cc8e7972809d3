//! The device that models run on: what the configuration asks for, and what this machine and this
//! build have.

use super::NodeError;
use crate::config::{DeviceSetting, EngineSettings, cache_dir};
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
    pub fn choose(engine: &EngineSettings) -> Result<Self, NodeError> {
        match engine.device {
            DeviceSetting::Cpu => Ok(Self::Cpu { no_gpu: None }),
            DeviceSetting::Auto => Ok(Self::automatic(engine.gpu_least_free_mib)),
            DeviceSetting::Cuda(number) => match gpu::probe(number) {
                Ok(properties) => Ok(Self::Gpu { number, properties }),
                Err(why) => {
                    let what = format!("engine.device is \"cuda:{number}\", but {why}");
                    Err(NodeError::new(what).remedy("or set engine.device to \"cpu\""))
                }
            },
        }
    }

    /// The first GPU, if it can be used and has so much free memory.
    fn automatic(least_free_mib: usize) -> Self {
        let found = gpu::probe(0).map_err(|why| why.to_string()).and_then(|properties| {
            let free = gpu::free_memory(0).map_err(|why| why.to_string())?;
            enough_memory(&properties, free, least_free_mib)?;
            Ok(properties)
        });
        match found {
            Ok(properties) => Self::Gpu { number: 0, properties },
            Err(why) => Self::Cpu { no_gpu: gpu::BUILT.then_some(why) },
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

/// Says in one sentence why a GPU with so much free memory is not taken unless it is named.
fn enough_memory(gpu: &Properties, free: usize, least_free_mib: usize) -> Result<(), String> {
    let (name, least) = (&gpu.name, least_free_mib << 20);
    let asked = format!("where engine.gpu_least_free_mib asks for {least_free_mib}");
    let [all, free_mib] = [gpu.memory_bytes, free].map(|bytes| bytes >> 20);
    if gpu.memory_bytes < least {
        return Err(format!("{name} is too small: it has {all} MiB of memory, {asked}"));
    }
    if free < least {
        let use_it = "close the programs that use it, or set engine.device to \"cuda:0\"";
        return Err(format!(
            "{name} is too full: {free_mib} of its {all} MiB are free, {asked}; {use_it}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_kernels::gpu::Emulator;

    #[test]
    fn a_gpu_that_is_too_small_or_too_full_is_told_in_one_sentence() {
        let check = |all_mib: usize, free_mib: usize, expect: Result<(), &str>| {
            let gpu = Emulator::card("rtx-3060", all_mib << 20).unwrap();
            let found = enough_memory(&gpu, free_mib << 20, 2048);
            assert_eq!(found.as_ref().map_err(String::as_str).copied(), expect, "{all_mib}");
        };
        check(12_288, 9_000, Ok(()));
        check(12_288, 2_048, Ok(()));
        check(
            12_288,
            2_047,
            Err("emulator is too full: 2047 of its 12288 MiB are free, where \
                 engine.gpu_least_free_mib asks for 2048; close the programs that use it, or set \
                 engine.device to \"cuda:0\""),
        );
        check(
            1_024,
            1_024,
            Err("emulator is too small: it has 1024 MiB of memory, where \
                 engine.gpu_least_free_mib asks for 2048"),
        );
    }
}

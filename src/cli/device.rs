//! Where models run: what the configuration asks for, and what this machine and this build have.

use super::support::output::{Failure, Result};
use crate::config::{Config, DeviceSetting, cache_dir};
use cresset_kernels::gpu::{self, Gpu, Properties};
use std::sync::Arc;

/// The GPU that models run on, with its number; none stands for the CPU.
pub fn chosen(config: &Config) -> Result<Option<(usize, Properties)>> {
    match config.engine.device {
        DeviceSetting::Cpu => Ok(None),
        DeviceSetting::Auto => Ok(gpu::probe(0).ok().map(|found| (0, found))),
        DeviceSetting::Cuda(number) => match gpu::probe(number) {
            Ok(found) => Ok(Some((number, found))),
            Err(why) => {
                let what = format!("engine.device is \"cuda:{number}\", but {why}");
                Err(Failure::new(what).remedy("or set engine.device to \"cpu\""))
            }
        },
    }
}

/// The chosen GPU, ready for work.
pub fn open(config: &Config) -> Result<Option<Arc<dyn Gpu>>> {
    let Some((number, _)) = chosen(config)? else { return Ok(None) };
    let options = gpu::DeviceOptions { folder: Some(cache_dir()), ..gpu::DeviceOptions::default() };
    gpu::open_with(number, &options).map(Some).map_err(Failure::new)
}

/// One sentence for people. A build without support for GPUs has nothing to say of them.
pub fn sentence(config: &Config) -> Result<Option<String>> {
    let chosen = chosen(config)?;
    let missing = || {
        gpu::probe(0).err().filter(|_| gpu::BUILT && config.engine.device == DeviceSetting::Auto)
    };
    Ok(chosen
        .map(|(number, found)| describe(number, &found))
        .or_else(|| missing().map(|why| format!("on the CPU: {why}"))))
}

fn describe(number: usize, found: &Properties) -> String {
    let Properties { name, capability: (major, minor), memory_bytes, versions, .. } = found;
    format!("on cuda:{number}: {name}, sm_{major}{minor}, {} MiB, {versions}", memory_bytes >> 20)
}

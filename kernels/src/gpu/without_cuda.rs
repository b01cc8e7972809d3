//! Replaces the CUDA device in builds without the feature `cuda`: there is no device, unless tests
//! have the process emulate some.

use super::{DeviceOptions, Gpu, GpuSensor, Properties};
use crate::{Error, Result};
use std::sync::Arc;

/// Whether this build has support for CUDA devices.
pub const BUILT: bool = false;

/// The limits of the device with this number.
///
/// # Errors
/// When there is no such device.
pub fn probe(number: usize) -> Result<Properties> {
    open(number).map(|device| device.properties().clone())
}

/// Bytes of the device's memory that are free.
///
/// # Errors
/// When there is no such device.
pub fn free_memory(number: usize) -> Result<usize> {
    open(number)?.memory().map(|(free, _)| free)
}

/// None here: no library tells of an emulator's condition.
///
/// # Errors
/// Always.
pub fn sensor(_: usize) -> Result<GpuSensor, String> {
    Err("this build asks no NVML".into())
}

/// The device with this number.
///
/// # Errors
/// When there is no such device.
pub fn open(number: usize) -> Result<Arc<dyn Gpu>> {
    open_with(number, &DeviceOptions::default())
}

/// The devices with these numbers, which compute one model together: ranks in this order.
///
/// # Errors
/// When there is no such device.
pub fn open_group(numbers: &[usize], options: &DeviceOptions) -> Result<Vec<Arc<dyn Gpu>>> {
    let all: Vec<_> =
        numbers.iter().map(|number| open_with(*number, options)).collect::<Result<_>>()?;
    #[cfg(feature = "emulator")]
    return Ok(super::emulator::group_like(&all, options));
    #[cfg(not(feature = "emulator"))]
    Ok(all)
}

/// The device with this number, whose launches are those of an emulator.
///
/// # Errors
/// When there is no such device.
#[cfg_attr(not(feature = "emulator"), expect(unused_variables, reason = "there is none"))]
pub fn open_with(number: usize, options: &DeviceOptions) -> Result<Arc<dyn Gpu>> {
    #[cfg(feature = "emulator")]
    if let Some(found) = super::emulator::numbered(number, options) {
        return Ok(found);
    }
    let why = "this build has no support for GPUs: build with `--features cuda`";
    Err(Error::NoDevice(why.into()))
}

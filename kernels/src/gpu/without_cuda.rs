//! Replaces the CUDA device in builds without the feature `cuda`: there is no device, unless tests
//! have the process emulate some.

use super::{DeviceOptions, Gpu, Properties};
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Whether this build has support for CUDA devices.
pub const BUILT: bool = false;

/// Whether kernels that use warp groups are built: the emulator's are.
pub(super) const WARP_GROUPS: bool = true;

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

/// None, as products are not measured here.
pub fn chosen_products(_: &Path, _: &Properties) -> BTreeSet<String> {
    BTreeSet::new()
}

/// The device with this number.
///
/// # Errors
/// When there is no such device.
#[cfg_attr(not(feature = "emulator"), expect(unused_variables, reason = "there is none"))]
pub fn open(number: usize) -> Result<Arc<dyn Gpu>> {
    #[cfg(feature = "emulator")]
    if let Some(found) = super::emulator::numbered(number) {
        return Ok(found);
    }
    let why = "this build has no support for GPUs: build with `--features cuda`";
    Err(Error::NoDevice(why.into()))
}

/// The devices with these numbers, which compute one model together: ranks in this order.
///
/// # Errors
/// When there is no such device.
pub fn open_group(numbers: &[usize], _: &DeviceOptions) -> Result<Vec<Arc<dyn Gpu>>> {
    let all: Vec<_> = numbers.iter().map(|number| open(*number)).collect::<Result<_>>()?;
    #[cfg(feature = "emulator")]
    return Ok(super::emulator::group_like(&all));
    #[cfg(not(feature = "emulator"))]
    Ok(all)
}

/// The device with this number, whatever the options.
///
/// # Errors
/// When there is no such device.
pub fn open_with(number: usize, _: &DeviceOptions) -> Result<Arc<dyn Gpu>> {
    open(number)
}

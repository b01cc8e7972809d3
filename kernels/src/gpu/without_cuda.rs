//! Replaces the CUDA device in builds without the feature `cuda`: there is no device.

use super::{DeviceOptions, Gpu, Properties};
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// Whether this build has support for CUDA devices.
pub const BUILT: bool = false;

const WHY: &str = "this build has no support for GPUs: build with `--features cuda`";

/// Fails, as there is no device.
pub fn probe(_: usize) -> Result<Properties> {
    Err(Error::NoDevice(WHY.into()))
}

/// Fails, as there is no device.
pub fn free_memory(_: usize) -> Result<usize> {
    Err(Error::NoDevice(WHY.into()))
}

/// None, as there is no device.
pub fn chosen_products(_: &Path, _: &Properties) -> BTreeSet<String> {
    BTreeSet::new()
}

/// Fails, as there is no device.
pub fn open(_: usize) -> Result<Arc<dyn Gpu>> {
    Err(Error::NoDevice(WHY.into()))
}

/// Fails, as there is no device.
pub fn open_with(_: usize, _: &DeviceOptions) -> Result<Arc<dyn Gpu>> {
    Err(Error::NoDevice(WHY.into()))
}

//! Builds without the feature `cuda` have no device.

use super::{Gpu, Options, Properties};
use crate::{Error, Result};
use std::sync::Arc;

/// Whether this build can use a device.
pub const BUILT: bool = false;

const WHY: &str = "this build has no support for GPUs: build with `--features cuda`";

/// The device with this number: there is none.
pub fn probe(_: usize) -> Result<Properties> {
    Err(Error::NoDevice(WHY.into()))
}

/// The device with this number: there is none.
pub fn open(_: usize) -> Result<Arc<dyn Gpu>> {
    Err(Error::NoDevice(WHY.into()))
}

/// The device with this number: there is none.
pub fn open_with(_: usize, _: &Options) -> Result<Arc<dyn Gpu>> {
    Err(Error::NoDevice(WHY.into()))
}

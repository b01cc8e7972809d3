//! A device has no kernels for recurrences yet: models that need them are refused when they are
//! loaded to one.

use super::args::{CONV, DELTA, NORM, SCAN};
use super::{DeltaRuleArgs, GatedNormArgs, Recurrence, SelectiveScanArgs, ShortConvArgs};
use crate::Result;
use crate::gpu::View;
use crate::operand::DeviceOps;
use crate::storage::no_kernel;

impl Recurrence for DeviceOps {
    const AVAILABLE: bool = false;

    fn short_conv(&self, _: &ShortConvArgs<View>) -> Result<()> {
        Err(no_kernel(CONV))
    }

    fn delta_rule(&self, _: &DeltaRuleArgs<View>) -> Result<()> {
        Err(no_kernel(DELTA))
    }

    fn selective_scan(&self, _: &SelectiveScanArgs<View>) -> Result<()> {
        Err(no_kernel(SCAN))
    }

    fn gated_norm(&self, _: &GatedNormArgs<View>) -> Result<()> {
        Err(no_kernel(NORM))
    }
}

//! A device has no kernels for these ops yet: models that need them are refused when they are
//! loaded to one.

use super::args::{CHOICES, INPUT, SCALE};
use super::{ChoiceFactorsArgs, Factors, LayerInputArgs, ScaleArgs};
use crate::Result;
use crate::gpu::View;
use crate::operand::DeviceOps;
use crate::storage::no_kernel;

impl Factors for DeviceOps {
    const HAS_FACTORS: bool = false;

    fn scale(&self, _: &ScaleArgs<View>) -> Result<()> {
        Err(no_kernel(SCALE))
    }

    fn layer_input(&self, _: &LayerInputArgs<View>) -> Result<()> {
        Err(no_kernel(INPUT))
    }

    fn choice_factors(&self, _: &ChoiceFactorsArgs<View>) -> Result<()> {
        Err(no_kernel(CHOICES))
    }
}

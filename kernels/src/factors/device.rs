//! A device has no kernels for these ops yet: models that need them are refused when they are
//! loaded to one.

use super::args::{CHOICES, INPUT, SCALE};
use super::{ChoiceFactorsArgs, Factors, LayerInputArgs, ScaleArgs};
use crate::Result;
use crate::gpu::View;
use crate::operand::DeviceOps;
use crate::storage::unsupported;

fn no_kernel(op: &'static str) -> Result<()> {
    Err(unsupported(op, "on a device: run the model on the CPU".into()))
}

impl Factors for DeviceOps {
    const HAS_FACTORS: bool = false;

    fn scale(&self, _: &ScaleArgs<View>) -> Result<()> {
        no_kernel(SCALE)
    }

    fn layer_input(&self, _: &LayerInputArgs<View>) -> Result<()> {
        no_kernel(INPUT)
    }

    fn choice_factors(&self, _: &ChoiceFactorsArgs<View>) -> Result<()> {
        no_kernel(CHOICES)
    }
}

//! Launches the kernels of `factors.cu` on a device, and for the inputs of layers those of gated
//! activations.

use super::{ChoiceFactorsArgs, Factors, LayerInputArgs, ScaleArgs};
use crate::activation::{GatedRows, launch_gated, vector};
use crate::experts::Routes;
use crate::gpu::{Launch, View};
use crate::operand::DeviceOps;
use crate::{Result, args};

const THREADS: usize = 128;

impl Factors for DeviceOps {
    fn scale(&self, args: &ScaleArgs<View>) -> Result<()> {
        args.check()?;
        let &ScaleArgs { x, factor } = args;
        if x.is_empty() {
            return Ok(());
        }
        let kernel = x.kind().kernel("scale_f32", "scale_bf16");
        let vector = vector(x.kind(), &[x.len()], &[x]);
        let blocks = [x.len().div_ceil(THREADS * vector) as u32, 1, 1];
        let launch = Launch { kernel, blocks, threads: THREADS as u32, shared_bytes: 0 };
        self.launch(&launch, &args![x, factor, x.len(), u32::from(vector > 1)])
    }

    fn layer_input(&self, args: &LayerInputArgs<View>) -> Result<()> {
        args.check()?;
        let &LayerInputArgs { activation, gate, inputs, stride, first, width, out } = args;
        if out.is_empty() {
            return Ok(());
        }
        let up = inputs.slice(first..inputs.len());
        let rows = GatedRows { gate, up, strides: [width, stride], width, out };
        launch_gated(&**self, activation, &rows)
    }

    fn choice_factors(&self, args: &ChoiceFactorsArgs<View>) -> Result<()> {
        args.check()?;
        let &ChoiceFactorsArgs { routes, factors } = args;
        let Routes { experts, weights, plan, .. } = routes;
        if weights.is_empty() {
            return Ok(());
        }
        let blocks = [weights.len().div_ceil(THREADS) as u32, 1, 1];
        let kernel = "choice_factors_f32";
        let launch = Launch { kernel, blocks, threads: THREADS as u32, shared_bytes: 0 };
        self.launch(&launch, &args![weights, plan, factors, weights.len(), experts])
    }
}

#[cfg(test)]
mod tests;

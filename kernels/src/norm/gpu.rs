//! Launches the RMSNorm of `norm.cu` on a device.

use super::{Norm, NormArgs};
use crate::gpu::{Launch, View};
use crate::operand::DeviceOps;
use crate::{Result, args};

impl Norm for DeviceOps {
    fn norm(&self, args: &NormArgs<View>) -> Result<()> {
        args.check()?;
        let &NormArgs { x, delta, weight, eps, out } = args;
        if x.is_empty() {
            return Ok(());
        }
        let kernel = x.kind().kernel("norm_f32", "norm_bf16");
        let width = weight.len();
        let blocks = [(x.len() / width) as u32, 1, 1];
        let launch = Launch { kernel, blocks, threads: 256, shared_bytes: 0 };
        self.launch(&launch, &args![x, delta, weight, out, width, eps])
    }
}

#[cfg(test)]
mod tests;

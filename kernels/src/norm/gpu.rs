//! Launches the norms of `norm.cu` on a device.

use super::{AddNormedArgs, Norm, NormArgs, NormColumnsArgs};
use crate::gpu::{Launch, View};
use crate::operand::DeviceOps;
use crate::{Result, args};

impl Norm for DeviceOps {
    fn norm(&self, args: &NormArgs<View>) -> Result<()> {
        args.check()?;
        let &NormArgs { x, delta, weight, eps, out, rounded } = args;
        if x.is_empty() {
            return Ok(());
        }
        let width = weight.len();
        let blocks = [(x.len() / width) as u32, 1, 1];
        let of = |kernel| Launch { kernel, blocks, threads: 256, shared_bytes: 0 };
        if let Some(rounded) = rounded {
            let args = args![x, delta, weight, out, rounded, width, eps];
            return self.launch(&of("norm_rounded_bf16"), &args);
        }
        let kernel = x.kind().kernel("norm_f32", "norm_bf16");
        self.launch(&of(kernel), &args![x, delta, weight, out, width, eps])
    }

    fn add_normed(&self, args: &AddNormedArgs<View>) -> Result<()> {
        args.check()?;
        let &AddNormedArgs { x, delta, weight, eps } = args;
        if x.is_empty() {
            return Ok(());
        }
        let kernel = x.kind().kernel("add_normed_f32", "add_normed_bf16");
        let width = weight.len();
        let blocks = [(x.len() / width) as u32, 1, 1];
        let launch = Launch { kernel, blocks, threads: 256, shared_bytes: 0 };
        self.launch(&launch, &args![x, delta, weight, width, eps])
    }

    fn norm_columns(&self, args: &NormColumnsArgs<View>) -> Result<()> {
        args.check()?;
        let &NormColumnsArgs { x, stride, first, weight, eps } = args;
        if x.is_empty() {
            return Ok(());
        }
        let kernel = x.kind().kernel("norm_columns_f32", "norm_columns_bf16");
        let blocks = [(x.len() / stride) as u32, 1, 1];
        let launch = Launch { kernel, blocks, threads: 256, shared_bytes: 0 };
        self.launch(&launch, &args![x, weight, stride, first, weight.len(), eps])
    }
}

#[cfg(test)]
mod tests;

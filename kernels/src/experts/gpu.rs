//! Launches the kernels of `experts.cu` on a device, and by `products` those for matrices of many
//! rows.

mod products;

use super::args::ExpertSizes;
use super::{CombineArgs, ExpertLinearArgs, Experts, RouteArgs, Routes};
use crate::error::ensure;
use crate::gpu::{Kind, Launch, View};
use crate::linear::gpu::on_tensor_cores;
use crate::operand::DeviceOps;
use crate::{Result, args};

/// Rows of scores, and rows of a matrix, that a block of four warps takes.
const WARPS: usize = 4;
/// Threads of a block that adds up results.
const COMBINE_THREADS: usize = 128;

impl Experts for DeviceOps {
    fn route(&self, args: &RouteArgs<View>) -> Result<()> {
        let n = args.check("route")?;
        if n == 0 {
            return Ok(());
        }
        let RouteArgs { scores, scoring, normalise, scale, routes } = *args;
        let Routes { experts, chosen, weights, plan } = routes;
        let [ids, begins, order] = products::parts(plan, n * chosen, experts);
        let blocks = [n.div_ceil(WARPS) as u32, 1, 1];
        let kernel = "route_f32";
        let choose = Launch { kernel, blocks, threads: 32 * WARPS as u32, shared_bytes: 0 };
        let normalise = u32::from(normalise);
        let (bias, [groups, kept]) = scoring.parts();
        let rule = args![bias, groups, kept, normalise, scale];
        let sizes = args![scores, n, experts, chosen];
        self.launch(&choose, &[&sizes[..], &rule, &args![ids, weights]].concat())?;
        let blocks = [experts as u32, 1, 1];
        let group = Launch { kernel: "group_choices_u32", blocks, threads: 32, shared_bytes: 0 };
        self.launch(&group, &args![ids, n * chosen, begins, order])
    }

    fn expert_linear(&self, args: &ExpertLinearArgs<View>) -> Result<()> {
        const OP: &str = "expert linear";
        let sizes = args.check(OP)?;
        let ExpertSizes { choices, choices_per_row, rows, cols } = sizes;
        let &ExpertLinearArgs { x, w, bias, routes, out } = args;
        if let Some(format) = w.whole().and_then(|part| part.format) {
            products::check_packed(args, &sizes, &format)?;
            return products::expert_linear(self, args, &sizes, Some(&format));
        }
        let experts = routes.experts;
        let fits = |w: &View| w.kind() == x.kind() && w.len() == experts * rows * cols;
        let dense = w.dense_values().filter(fits);
        ensure(OP, dense.is_some(), || {
            format!("{w:?} of {experts} experts of {rows} by {cols} for {x:?}")
        })?;
        if on_tensor_cores(x, cols, dense) {
            return products::expert_linear(self, args, &sizes, None);
        }
        if choices == 0 {
            return Ok(());
        }
        let [ids, begins, order] = products::parts(routes.plan, choices, experts);
        let kernel = x.kind().kernel("expert_linear_f32", "expert_linear_bf16");
        let blocks = [rows.div_ceil(WARPS) as u32, experts.min(choices) as u32, 1];
        let launch = Launch { kernel, blocks, threads: 32 * WARPS as u32, shared_bytes: 0 };
        let plan = args![ids, begins, order, choices, experts, choices_per_row];
        self.launch(&launch, &[&args![x, dense, bias, out, rows, cols][..], &plan].concat())
    }

    fn combine(&self, args: &CombineArgs<View>) -> Result<()> {
        let (n, width) = args.check("combine")?;
        if args.out.is_empty() {
            return Ok(());
        }
        let &CombineArgs { x, routes: Routes { chosen, weights, .. }, shared, out } = args;
        let kernel = x.kind().kernel("combine_f32", "combine_bf16");
        let lanes = 16 / if x.kind() == Kind::Bf16 { 2 } else { 4 };
        let lanes = if width.is_multiple_of(lanes) { lanes } else { 1 };
        let parts = width.div_ceil(COMBINE_THREADS * lanes) as u32;
        let blocks = [n as u32, parts, 1];
        let launch = Launch { kernel, blocks, threads: COMBINE_THREADS as u32, shared_bytes: 0 };
        let (also, gate) = (shared.map(|shared| shared.x), shared.and_then(|shared| shared.gate));
        self.launch(&launch, &args![x, weights, also, gate, out, chosen, width])
    }
}

#[cfg(test)]
mod tests;

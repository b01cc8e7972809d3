//! Products with the packed matrices of experts on a device. `packed_experts.cu` describes the
//! kernels.

use super::parts;
use crate::experts::ExpertLinearArgs;
use crate::experts::args::ExpertSizes;
use crate::gpu::{Gpu, Kind, Launch, Properties, View};
use crate::linear::gpu::{GEMV_TOKENS, PackedKernels};
use crate::linear::{BAND_ROWS, DeviceFormat};
use crate::operand::DeviceOps;
use crate::storage::ensure;
use crate::{Result, args};

/// Rows of a matrix that a block of the GEMM takes.
const GEMM_ROWS: usize = 64;

/// The kernels for experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpertKernel {
    /// A few choices of an expert at a time.
    Gemv,
    /// Many.
    Gemm,
}

fn choose(
    kernels: &PackedKernels,
    sizes: &ExpertSizes,
    experts: usize,
    properties: &Properties,
) -> ExpertKernel {
    let few = sizes.choices <= GEMV_TOKENS[0] * experts;
    let room = kernels.gemv_bytes(0) <= properties.shared_bytes as usize;
    if few && room { ExpertKernel::Gemv } else { ExpertKernel::Gemm }
}

/// `args.w` has the bytes of the format.
pub(super) fn expert_linear(
    gpu: &DeviceOps,
    args: &ExpertLinearArgs<View>,
    sizes: &ExpertSizes,
    format: &DeviceFormat,
) -> Result<()> {
    check(args, sizes, format)?;
    if sizes.choices == 0 {
        return Ok(());
    }
    let kernels = PackedKernels::of(format);
    let kernel = choose(kernels, sizes, args.routes.experts, gpu.properties());
    run_by(&**gpu, args, sizes, format, kernel)
}

/// Each expert's matrix is made of whole bands.
fn check(
    &ExpertLinearArgs { x, w, .. }: &ExpertLinearArgs<View>,
    &ExpertSizes { rows, cols, .. }: &ExpertSizes,
    format: &DeviceFormat,
) -> Result<()> {
    let holds = |values: View| {
        values.kind() == Kind::U8
            && values.len() == format.bytes(w.rows, cols)
            && values.address().is_multiple_of(16)
    };
    let fits = x.kind() == Kind::Bf16
        && x.address().is_multiple_of(16)
        && rows.is_multiple_of(BAND_ROWS)
        && w.order.is_none()
        && w.whole().is_some_and(|part| holds(part.values));
    ensure("expert linear", fits, || {
        format!("{x:?} and {w:?} for experts of {rows} by {cols}: they take bf16 and whole bands")
    })
}

fn run_by(
    gpu: &dyn Gpu,
    args: &ExpertLinearArgs<View>,
    &ExpertSizes { choices, choices_per_row, rows, cols }: &ExpertSizes,
    format: &DeviceFormat,
    kernel: ExpertKernel,
) -> Result<()> {
    let &ExpertLinearArgs { x, w, bias, routes, out } = args;
    let (kernels, experts) = (PackedKernels::of(format), routes.experts);
    let read = experts.min(choices);
    let (kernel, across, threads, shared_bytes) = match kernel {
        ExpertKernel::Gemv => {
            // Two blocks for each multiprocessor, if experts have so many bands.
            let most = (2 * gpu.properties().multiprocessors as usize).div_ceil(read);
            let blocks = (rows / BAND_ROWS).min(most);
            (kernels.expert_gemv, blocks, 256, kernels.gemv_bytes(0))
        }
        ExpertKernel::Gemm => {
            (kernels.expert_gemm, rows.div_ceil(GEMM_ROWS), 128, kernels.gemm_bytes())
        }
    };
    let blocks = [across as u32, read as u32, 1];
    let launch = Launch { kernel, blocks, threads, shared_bytes: shared_bytes as u32 };
    let values = w.whole().map(|part| part.values);
    let [ids, begins, order] = parts(routes.plan, choices, experts);
    let plan = args![ids, begins, order, choices, experts, choices_per_row];
    let all = [&args![x, values, bias, out, rows, cols][..], &plan, &format.numbers()];
    gpu.launch(&launch, &all.concat())
}

#[cfg(test)]
mod tests;

//! Products with the matrices of experts on a device, in bf16 or in the packed form. `products.cu`
//! describes the kernels.

use crate::error::ensure;
use crate::experts::ExpertLinearArgs;
use crate::experts::args::ExpertSizes;
use crate::gpu::{Gpu, Kind, Launch, Properties, View};
use crate::linear::gpu::{EXPERT_TOKENS, PackedKernels};
use crate::linear::{BAND_ROWS, DeviceFormat};
use crate::operand::DeviceOps;
use crate::{Result, args};

/// Rows of a matrix that a block of the GEMM takes.
const GEMM_ROWS: usize = 64;

/// The three parts of a plan for `choices` choices.
pub(super) fn parts(plan: View, choices: usize, experts: usize) -> [View; 3] {
    let begins = choices + experts + 1;
    [plan.slice(0..choices), plan.slice(choices..begins), plan.slice(begins..begins + choices)]
}

/// The kernels for experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpertKernel {
    /// A few choices of an expert at a time.
    Gemv,
    /// Many.
    Gemm,
}

/// Both kernels for matrices of one form, with their shared memory.
struct ExpertKernels {
    gemv: &'static str,
    gemm: &'static str,
    /// Warps and bytes of a block of the GEMV; `None`: the device has no room for it.
    gemv_block: Option<(usize, usize)>,
    gemm_bytes: usize,
}

impl ExpertKernels {
    /// Tiles of 64 columns in bf16: two slots of 32 rows and 8 choices for each of eight warps, and
    /// their sums; four slots of 64 rows and 64 choices.
    const DENSE: Self = Self {
        gemv: "expert_gemv_bf16",
        gemm: "expert_gemm_bf16",
        gemv_block: Some((8, 8 * (2 * (32 + 8) * 128 + 32 * 8 * 4))),
        gemm_bytes: 4 * (64 + 64) * 128,
    };

    fn of(format: Option<&DeviceFormat>, properties: &Properties) -> Self {
        let Some(format) = format else { return Self::DENSE };
        let kernels = PackedKernels::of(format);
        Self {
            gemv: kernels.expert_gemv,
            gemm: kernels.expert_gemm,
            gemv_block: kernels.expert_gemv_block(properties),
            gemm_bytes: kernels.gemm_bytes(),
        }
    }

    fn choose(&self, choices: usize, experts: usize) -> ExpertKernel {
        let few = choices <= EXPERT_TOKENS * experts;
        if few && self.gemv_block.is_some() { ExpertKernel::Gemv } else { ExpertKernel::Gemm }
    }
}

/// The matrices are dense, or have the bytes of the format.
pub(super) fn expert_linear(
    gpu: &DeviceOps,
    args: &ExpertLinearArgs<View>,
    sizes: &ExpertSizes,
    format: Option<&DeviceFormat>,
) -> Result<()> {
    if sizes.choices == 0 {
        return Ok(());
    }
    let kernels = ExpertKernels::of(format, gpu.properties());
    let kernel = kernels.choose(sizes.choices, args.routes.experts);
    run_by(&**gpu, args, sizes, format, kernel)
}

/// Each expert's matrix is made of whole bands.
pub(super) fn check_packed(
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
        && w.order().is_none()
        && w.whole().is_some_and(|part| holds(part.values));
    ensure("expert linear", fits, || {
        format!("{x:?} and {w:?} for experts of {rows} by {cols}: they take bf16 and whole bands")
    })
}

fn run_by(
    gpu: &dyn Gpu,
    args: &ExpertLinearArgs<View>,
    &ExpertSizes { choices, choices_per_row, rows, cols }: &ExpertSizes,
    format: Option<&DeviceFormat>,
    kernel: ExpertKernel,
) -> Result<()> {
    let &ExpertLinearArgs { x, w, bias, routes, out } = args;
    let (kernels, experts) = (ExpertKernels::of(format, gpu.properties()), routes.experts);
    let read = experts.min(choices);
    let (kernel, across, threads, shared_bytes) = match kernel {
        ExpertKernel::Gemv => {
            let block = kernels.gemv_block;
            let (warps, bytes) = block.expect("invariant: a GEMV is chosen if there is room");
            // Sixteen warps for each multiprocessor, if experts have enough bands for that.
            let most = (16 / warps * gpu.properties().multiprocessors as usize).div_ceil(read);
            let blocks = rows.div_ceil(BAND_ROWS).min(most);
            (kernels.gemv, blocks, 32 * warps as u32, bytes)
        }
        ExpertKernel::Gemm => (kernels.gemm, rows.div_ceil(GEMM_ROWS), 128, kernels.gemm_bytes),
    };
    let blocks = [across as u32, read as u32, 1];
    let launch = Launch { kernel, blocks, threads, shared_bytes: shared_bytes as u32 };
    let values = w.whole().map(|part| part.values);
    let [ids, begins, order] = parts(routes.plan, choices, experts);
    let plan = args![ids, begins, order, choices, experts, choices_per_row];
    let numbers = format.map(DeviceFormat::numbers);
    let numbers = numbers.as_ref().map_or(&[][..], |numbers| &numbers[..]);
    gpu.launch(&launch, &[&args![x, values, bias, out, rows, cols][..], &plan, numbers].concat())
}

#[cfg(test)]
mod tests;

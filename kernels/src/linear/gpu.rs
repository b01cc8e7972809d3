//! Products on a device: cuBLASLt, our GEMV for few rows, and our GEMM, whose result for a row does
//! not depend on the other rows, because their split-K has fixed splits. `linear.cu` and
//! `warp_groups.cu` describe the kernels, and `packed.cu` those for packed weights.

mod columns;
mod eight_bits;
mod ops;
mod packed;

pub use columns::GATHERED_ROWS;
pub use eight_bits::ROUNDED_ROWS;
pub(crate) use packed::{EXPERT_TOKENS, Kernels as PackedKernels};
pub use packed::{SCRATCH_BYTES, uses_scratch};

use super::{LinearArgs, Mode};
use crate::gpu::{Gemm, Gpu, Kind, Launch, Properties, View};
use crate::operand::DeviceOps;
use crate::{Result, args};

/// From this many rows of `x` on, the library may multiply, where our GEMV has no room.
pub const LIBRARY_ROWS: usize = 9;
/// Up to this many rows of `x` our GEMV is used in the fast mode. On an H200, it takes 114 us for
/// the four products of a layer of Llama 3.1 8B with 16 rows, and the library 120. With 32 rows it
/// is the faster one alone, and yet a whole step took 6.3 ms in a run with it and 6.1 in an earlier
/// one with the library. Its blocks leave no shared memory in which the next launch could begin,
/// which may be why; the two were not compared in one run.
const FAST_GEMV_ROWS: usize = 16;

/// A GEMV kernel of `linear.cu`, for up to `tokens` rows of `x`.
#[derive(Debug, PartialEq, Eq)]
struct GemvKernel {
    kernel: &'static str,
    /// Rows of `w` that a block takes at a time.
    band: usize,
    tokens: usize,
    /// Tiles of `w` for which a warp has room.
    slots: usize,
}

/// The first that takes the rows and fits the device is used.
static GEMV_KERNELS: [GemvKernel; 4] = [
    GemvKernel { kernel: "gemv_8_bf16", band: 16, tokens: 8, slots: 4 },
    GemvKernel { kernel: "gemv_8_three_slots_bf16", band: 16, tokens: 8, slots: 3 },
    GemvKernel { kernel: "gemv_16_bf16", band: 32, tokens: 16, slots: 3 },
    GemvKernel { kernel: "gemv_32_bf16", band: 32, tokens: 32, slots: 3 },
];

impl GemvKernel {
    /// Each of eight warps has its slots of 64 columns of two bytes, and its sums.
    fn shared_bytes(&self) -> u32 {
        8 * (self.slots * (self.band + self.tokens) * 128 + self.band * self.tokens * 4) as u32
    }
}

/// A GEMM kernel of `linear.cu`, whose blocks compute `rows` rows of `w` by `columns` rows of `x`.
#[derive(Debug, PartialEq, Eq)]
struct GemmKernel {
    kernel: &'static str,
    rows: usize,
    columns: usize,
    stages: u32,
    threads: u32,
}

/// Large tiles read the least in all; small ones give more blocks work when there are few rows.
static GEMM_KERNELS: [GemmKernel; 3] = [
    GemmKernel { kernel: "gemm_128x128_bf16", rows: 128, columns: 128, stages: 4, threads: 256 },
    GemmKernel { kernel: "gemm_64x64_bf16", rows: 64, columns: 64, stages: 6, threads: 128 },
    GemmKernel { kernel: "gemm_32x64_bf16", rows: 32, columns: 64, stages: 8, threads: 128 },
];

/// A kernel of `warp_groups.cu`, whose blocks go from tile to tile.
#[derive(Debug, PartialEq, Eq)]
struct GroupKernel {
    kernel: &'static str,
    rows: usize,
    columns: usize,
    /// Tiles of 64 columns of `w` and `x` for which each split has room.
    slots: usize,
    /// Parts into which a block cuts the columns.
    splits: usize,
}

static GROUP_KERNELS: [GroupKernel; 5] = [
    GroupKernel { kernel: "gemm_group_192x128_bf16", rows: 192, columns: 128, slots: 5, splits: 1 },
    GroupKernel { kernel: "gemm_group_128x128_bf16", rows: 128, columns: 128, slots: 6, splits: 1 },
    GroupKernel { kernel: "gemm_group_128x64_bf16", rows: 128, columns: 64, slots: 4, splits: 1 },
    GroupKernel { kernel: "gemm_group_64x64_bf16", rows: 64, columns: 64, slots: 3, splits: 4 },
    GroupKernel { kernel: "gemm_group_32x64_bf16", rows: 32, columns: 64, slots: 4, splits: 4 },
];

impl GroupKernel {
    /// A warp group multiplies 64 rows of `x`.
    fn threads(&self) -> u32 {
        (self.columns / 64 * self.splits * 128) as u32
    }

    /// Slots, and where there are splits, the sums of a tile.
    fn shared_bytes(&self) -> u32 {
        let sums = if self.splits > 1 { self.rows * self.columns * 4 } else { 0 };
        (self.splits * self.slots * (self.rows + self.columns) * 128 + sums) as u32
    }

    fn tiles(&self, n: usize, rows: usize) -> usize {
        n.div_ceil(self.columns) * rows.div_ceil(self.rows)
    }

    fn launch(&self, n: usize, rows: usize, properties: &Properties) -> Launch {
        let shared_bytes = self.shared_bytes();
        let most = properties.multiprocessors as usize * properties.resident(shared_bytes);
        let blocks = [self.tiles(n, rows).min(most) as u32, 1, 1];
        Launch { kernel: self.kernel, blocks, threads: self.threads(), shared_bytes }
    }
}

impl GemmKernel {
    /// A slot holds 64 columns of two bytes.
    fn shared_bytes(&self) -> u32 {
        self.stages * (self.rows + self.columns) as u32 * 128
    }

    fn blocks(&self, n: usize, rows: usize) -> usize {
        n.div_ceil(self.columns) * rows.div_ceil(self.rows)
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Algorithm {
    Library,
    Gemv(&'static GemvKernel),
    Gemm(&'static GemmKernel),
    GroupGemm(&'static GroupKernel),
    Dot,
}

/// The product of `n` rows with each part of a matrix, whose columns are in the order of the
/// inputs.
fn by_parts(gpu: &DeviceOps, args: &LinearArgs<View>, n: usize) -> Result<()> {
    let &LinearArgs { x, w, bias, out, mode } = args;
    let (cols, out_stride) = (w.cols, w.rows);
    let mut first = 0;
    for part in w.parts() {
        let (rows, values, from, scales) = (part.rows, part.values, first, None);
        first += rows;
        let bias = bias.map(|bias| bias.slice(from..first));
        let out = out.slice(from..out.len());
        let product =
            Gemm { x, x_stride: cols, w: values, bias, out, out_stride, n, rows, cols, scales };
        if let Some(format) = part.format {
            packed::run(gpu, &product, &format, mode, w.scratch)?;
        } else {
            product.check()?;
            run(&**gpu, &product, &choose_algorithm(&product, mode, gpu.properties()))?;
        }
    }
    Ok(())
}

/// Whether kernels for tensor cores take rows of `x` of `cols` values, beside the other operands.
/// They read and write 16 bytes at once.
pub(crate) fn on_tensor_cores(
    x: View,
    cols: usize,
    others: impl IntoIterator<Item = View>,
) -> bool {
    let aligned = |view: View| view.address().is_multiple_of(16);
    x.kind() == Kind::Bf16
        && cols.is_multiple_of(8)
        && aligned(x)
        && others.into_iter().all(aligned)
}

fn choose_algorithm(product: &Gemm, mode: Mode, properties: &Properties) -> Algorithm {
    let &Gemm { x, w, out, n, rows, cols, .. } = product;
    let tensor = on_tensor_cores(x, cols, [w, out]);
    let most = if mode == Mode::Fast { FAST_GEMV_ROWS } else { usize::MAX };
    let fits = |gemv: &&GemvKernel| {
        n <= gemv.tokens.min(most) && gemv.shared_bytes() <= properties.shared_bytes
    };
    let gemv = GEMV_KERNELS.iter().find(fits);
    match (mode, gemv) {
        (_, Some(gemv)) if tensor => Algorithm::Gemv(gemv),
        (Mode::Fast, _) if n >= LIBRARY_ROWS && product.library_takes() => Algorithm::Library,
        _ if tensor && properties.warp_groups => {
            Algorithm::GroupGemm(choose_group_tile(n, rows, properties))
        }
        _ if tensor => Algorithm::Gemm(choose_tile(n, rows, properties)),
        _ => Algorithm::Dot,
    }
}

/// The largest tile that is more than half full and gives at least three quarters of the
/// multiprocessors a block.
fn choose_tile(n: usize, rows: usize, properties: &Properties) -> &'static GemmKernel {
    let enough = properties.multiprocessors as usize * 3 / 4;
    let fits = |tile: &&GemmKernel| {
        tile.shared_bytes() <= properties.shared_bytes
            && n > tile.columns / 2
            && tile.blocks(n, rows) >= enough
    };
    GEMM_KERNELS.iter().find(fits).unwrap_or(&GEMM_KERNELS[GEMM_KERNELS.len() - 1])
}

/// The tile with which the busiest multiprocessor copies the fewest rows of `w` and `x`: copies are
/// what bounds these kernels, but for the largest.
fn choose_group_tile(n: usize, rows: usize, properties: &Properties) -> &'static GroupKernel {
    let multiprocessors = properties.multiprocessors as usize;
    let copied = |tile: &&GroupKernel| {
        tile.tiles(n, rows).div_ceil(multiprocessors) * (tile.rows + tile.columns)
    };
    GROUP_KERNELS.iter().min_by_key(copied).expect("invariant: there are kernels")
}

fn run(gpu: &dyn Gpu, product: &Gemm, algorithm: &Algorithm) -> Result<()> {
    let &Gemm { x, w, bias, out, out_stride, n, rows, cols, .. } = product;
    let multiprocessors = gpu.properties().multiprocessors as usize;
    let launch = |kernel, [across, down]: [usize; 2], threads, shared_bytes| {
        let blocks = [across as u32, down as u32, 1];
        Launch { kernel, blocks, threads, shared_bytes }
    };
    let launch = match algorithm {
        Algorithm::Library => return gpu.gemm(product),
        Algorithm::Gemv(gemv) => {
            let blocks = rows.div_ceil(gemv.band).min(multiprocessors);
            launch(gemv.kernel, [blocks, 1], 256, gemv.shared_bytes())
        }
        Algorithm::Gemm(tile) => {
            launch(tile.kernel, [tile.blocks(n, rows), 1], tile.threads, tile.shared_bytes())
        }
        Algorithm::GroupGemm(tile) => tile.launch(n, rows, gpu.properties()),
        Algorithm::Dot => {
            let kernel = x.kind().kernel("dot_f32", "dot_bf16");
            launch(kernel, [rows.div_ceil(4), n.div_ceil(8)], 128, 0)
        }
    };
    let f32_out = u32::from(out.kind() == Kind::F32);
    gpu.launch(&launch, &args![x, w, bias, out, f32_out, n, rows, cols, out_stride])
}

#[cfg(test)]
mod tests;

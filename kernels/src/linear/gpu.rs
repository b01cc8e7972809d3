//! Dense products on a device: cuBLASLt, the row-by-row kernel for few rows, and the kernel whose
//! result for a row depends on nothing else. `linear.cu` says how.

use super::{Linear, LinearArgs, Mode};
use crate::gpu::{Gemm, Gpu, Kind, Launch, Properties, View};
use crate::operand::{DeviceOps, MatrixView};
use crate::{Result, args};

/// Most rows of `x` for which the row-by-row kernel is taken to be the fastest. The library
/// computes no fewer.
pub const FEW: usize = 8;

/// The row-by-row kernel for up to so many rows of `x`.
#[derive(Debug, PartialEq, Eq)]
struct Few {
    kernel: &'static str,
    tokens: usize,
}

static FEWS: [Few; 3] = [
    Few { kernel: "gemv_8_bf16", tokens: 8 },
    Few { kernel: "gemv_16_bf16", tokens: 16 },
    Few { kernel: "gemv_32_bf16", tokens: 32 },
];

impl Few {
    /// Rows of `w` that a block takes at a time.
    const ROWS: usize = 32;

    /// For each of eight warps three slots of 64 columns of two bytes, and its sums.
    fn shared_bytes(&self) -> u32 {
        8 * (3 * (Self::ROWS + self.tokens) * 128 + Self::ROWS * self.tokens * 4) as u32
    }
}

/// A kernel of `linear.cu` by the rows of `w` and of `x` that a block takes.
#[derive(Debug, PartialEq, Eq)]
struct Tile {
    kernel: &'static str,
    rows: usize,
    columns: usize,
    stages: u32,
    threads: u32,
}

/// From the one that reads least to the one that cuts finest.
static TILES: [Tile; 3] = [
    Tile { kernel: "gemm_128x128_bf16", rows: 128, columns: 128, stages: 4, threads: 256 },
    Tile { kernel: "gemm_64x64_bf16", rows: 64, columns: 64, stages: 6, threads: 128 },
    Tile { kernel: "gemm_32x64_bf16", rows: 32, columns: 64, stages: 8, threads: 128 },
];

impl Tile {
    /// A slot holds 64 columns of two bytes.
    fn shared_bytes(&self) -> u32 {
        self.stages * (self.rows + self.columns) as u32 * 128
    }

    fn blocks(&self, n: usize, rows: usize) -> usize {
        n.div_ceil(self.columns) * rows.div_ceil(self.rows)
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Way {
    Library,
    Gemv(&'static Few),
    Gemm(&'static Tile),
    Dot,
}

/// Fast kernels of our own are for bf16 with `cols` a multiple of 8 and operands aligned to 16
/// bytes; others take a simple one.
impl Linear for DeviceOps {
    fn linear(&self, args: &LinearArgs<View>) -> Result<()> {
        let n = args.check()?;
        let &LinearArgs { x, w: MatrixView { values: w, rows, cols }, bias, out, mode } = args;
        let product = Gemm { x, x_stride: cols, w, bias, out, out_stride: rows, n, rows, cols };
        product.check()?;
        if n == 0 {
            return Ok(());
        }
        run(&**self, &product, &way(&product, mode, self.properties()))
    }
}

fn way(product: &Gemm, mode: Mode, properties: &Properties) -> Way {
    let &Gemm { x, w, out, n, rows, cols, .. } = product;
    // What the tensor-core kernels read and write at once.
    let aligned = [x, w, out].iter().all(|view| view.address().is_multiple_of(16));
    let tensor = x.kind() == Kind::Bf16 && cols.is_multiple_of(8) && aligned;
    let few =
        FEWS.iter().find(|few| n <= few.tokens && few.shared_bytes() <= properties.shared_bytes);
    match (mode, few) {
        (Mode::Fast, _) if n > FEW => Way::Library,
        _ if !tensor => Way::Dot,
        (_, Some(few)) => Way::Gemv(few),
        (_, None) => Way::Gemm(tile(n, rows, properties)),
    }
}

/// The largest tile that is mostly used and gives three quarters of the multiprocessors work.
fn tile(n: usize, rows: usize, properties: &Properties) -> &'static Tile {
    let enough = properties.multiprocessors as usize * 3 / 4;
    let fits = |tile: &&Tile| {
        tile.shared_bytes() <= properties.shared_bytes
            && n > tile.columns / 2
            && tile.blocks(n, rows) >= enough
    };
    TILES.iter().find(fits).unwrap_or(&TILES[TILES.len() - 1])
}

fn run(gpu: &dyn Gpu, product: &Gemm, way: &Way) -> Result<()> {
    let &Gemm { x, w, bias, out, n, rows, cols, .. } = product;
    let multiprocessors = gpu.properties().multiprocessors as usize;
    let (kernel, blocks, threads, shared_bytes) = match way {
        Way::Library => return gpu.gemm(product),
        Way::Gemv(few) => (
            few.kernel,
            [rows.div_ceil(Few::ROWS).min(multiprocessors), 1],
            256,
            few.shared_bytes(),
        ),
        Way::Gemm(tile) => {
            (tile.kernel, [tile.blocks(n, rows), 1], tile.threads, tile.shared_bytes())
        }
        Way::Dot if x.kind() == Kind::Bf16 => {
            ("dot_bf16", [rows.div_ceil(4), n.div_ceil(8)], 128, 0)
        }
        Way::Dot => ("dot_f32", [rows.div_ceil(4), n.div_ceil(8)], 128, 0),
    };
    let launch =
        Launch { kernel, blocks: [blocks[0] as u32, blocks[1] as u32, 1], threads, shared_bytes };
    gpu.launch(&launch, &args![x, w, bias, out, u32::from(out.kind() == Kind::F32), n, rows, cols])
}

#[cfg(test)]
mod tests;

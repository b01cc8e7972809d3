//! The op on a device: which way a product takes.

use super::{by_parts, columns, eight_bits, on_tensor_cores};
use crate::error::ensure;
use crate::gpu::{Launch, View};
use crate::linear::{HEADS, HeadLinearArgs, Linear, LinearArgs};
use crate::operand::{DeviceOps, MatrixInputs};
use crate::{Result, args};

/// Rows and columns of a tile of a head's product, and the slots of 64 columns of its operands.
const HEAD_TILE: usize = 64;
const HEAD_STAGES: u32 = 3;

/// Fast kernels of our own are for bf16 with `cols` a multiple of 8 and operands aligned to 16
/// bytes; others take a simple one.
impl Linear for DeviceOps {
    /// A row's result has the same bits whatever other rows there are.
    fn head_linear(&self, args: &HeadLinearArgs<View>) -> Result<()> {
        let n = args.check()?;
        let &HeadLinearArgs { x, w, heads, out } = args;
        let (rows, cols) = (w.rows / heads, w.cols);
        let fits = |values: &View| values.kind() == x.kind() && values.len() == w.rows * cols;
        let dense = w.dense_values().filter(fits);
        ensure(HEADS, dense.is_some(), || format!("{w:?} is not dense and of the kind of {x:?}"))?;
        if n == 0 {
            return Ok(());
        }
        let launch = if on_tensor_cores(x, cols, dense) {
            let tiles = rows.div_ceil(HEAD_TILE) * n.div_ceil(HEAD_TILE);
            let blocks = [tiles as u32, heads as u32, 1];
            let shared_bytes = HEAD_STAGES * 2 * HEAD_TILE as u32 * 128;
            Launch { kernel: "head_gemm_bf16", blocks, threads: 128, shared_bytes }
        } else {
            let kernel = x.kind().kernel("head_dot_f32", "head_dot_bf16");
            let blocks = [rows.div_ceil(4) as u32, n.div_ceil(8) as u32, heads as u32];
            Launch { kernel, blocks, threads: 128, shared_bytes: 0 }
        };
        self.launch(&launch, &args![x, dense, out, n, rows, cols])
    }

    fn linear(&self, args: &LinearArgs<View>) -> Result<()> {
        let n = args.check()?;
        match args.w.inputs {
            _ if n == 0 => Ok(()),
            MatrixInputs::InOrder(order) => columns::in_order(self, args, n, order),
            MatrixInputs::Rounded(own) => eight_bits::multiply(self, args, n, own, false),
            MatrixInputs::Plain => by_parts(self, args, n),
        }
    }

    fn rounded_linear(&self, args: &LinearArgs<View>) -> Result<()> {
        let n = args.check()?;
        match args.w.inputs {
            MatrixInputs::Rounded(own) if n > 0 => eight_bits::multiply(self, args, n, own, true),
            _ => self.linear(args),
        }
    }
}

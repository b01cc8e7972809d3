//! Products with matrices whose columns are in another order than the inputs. `columns.cu`
//! describes the kernel that puts inputs into the order of the columns.

use super::by_parts;
use crate::error::ensure;
use crate::gpu::{Kind, Launch, View};
use crate::linear::LinearArgs;
use crate::operand::{ColumnsView, DeviceOps};
use crate::{Result, args};

/// Rows for which there should be memory in the order of columns: more are multiplied in parts, and
/// for each the library dequantises the weights anew.
pub const GATHERED_ROWS: usize = 1024;
/// Neighbouring columns of a thread, and threads of a block.
const LANES: usize = 8;
const THREADS: usize = 256;

/// Multiplies as many of the `n` rows at a time as there is memory for.
pub(super) fn in_order(
    gpu: &DeviceOps,
    args: &LinearArgs<View>,
    n: usize,
    order: ColumnsView,
) -> Result<()> {
    let &LinearArgs { x, w, out, .. } = args;
    let cols = w.cols;
    let most = order.gathered.len() / cols;
    let fits = w.parts().all(|part| part.format.is_some())
        && x.kind() == Kind::Bf16
        && order.gathered.kind() == Kind::Bf16
        && order.inputs.kind() == Kind::U32
        && order.inputs.len() == cols
        && cols.is_multiple_of(LANES)
        && most > 0;
    ensure("linear", fits, || format!("{x:?} in the order {order:?} of {cols} packed columns"))?;
    for first in (0..n).step_by(most) {
        let count = most.min(n - first);
        let gathered = order.gathered.slice(0..count * cols);
        let rows = x.slice(first * cols..(first + count) * cols);
        gather(gpu, rows, order.inputs, gathered, [count, cols])?;
        let out = out.slice(first * w.rows..(first + count) * w.rows);
        by_parts(gpu, &LinearArgs { x: gathered, out, ..*args }, count)?;
    }
    Ok(())
}

fn gather(gpu: &DeviceOps, x: View, inputs: View, out: View, [n, cols]: [usize; 2]) -> Result<()> {
    let blocks = [n as u32, cols.div_ceil(THREADS * LANES) as u32, 1];
    let kernel = "gather_columns_bf16";
    let launch = Launch { kernel, blocks, threads: THREADS as u32, shared_bytes: 0 };
    gpu.launch(&launch, &args![x, inputs, out, cols])
}

#[cfg(test)]
mod tests;

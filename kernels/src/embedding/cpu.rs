//! Rows are copied or decoded one by one, shared out among the threads.

use super::{Embedding, GatherArgs, SelectRowsArgs};
use crate::error::ensure;
use crate::operand::{Operand, TensorView};
use crate::storage::{read, write};
use crate::{Compute, Result};

/// Elements that one task copies or decodes: enough to be worth handing out.
const TASK_ELEMENTS: usize = 8192;

impl Embedding for Compute {
    fn gather(&self, args: &GatherArgs<TensorView>) -> Result<()> {
        const OP: &str = "embedding gather";
        args.check(OP)?;
        let &GatherArgs { table, ids, device, scale, out } = args;
        check_indices(OP, ids, table.rows())?;
        ensure(OP, device.is_none(), || "the CPU keeps no tokens beside their K and V".into())?;
        let fill = |i: usize, row: &mut [f32]| {
            table.row_f32(ids[i] as usize, row);
            for value in row {
                *value *= scale;
            }
        };
        write(OP, out, |out| for_each_row(self, out, table.cols(), fill))
    }

    fn select_rows(&self, args: &SelectRowsArgs<TensorView>) -> Result<()> {
        const OP: &str = "row selection";
        args.check(OP)?;
        let &SelectRowsArgs { x, width, rows, out } = args;
        check_indices(OP, rows, x.len() / width)?;
        let x = read::<f32>(OP, x)?;
        let fill = |i: usize, row: &mut [f32]| {
            row.copy_from_slice(&x[rows[i] as usize * width..][..width]);
        };
        write(OP, out, |out| for_each_row(self, out, width, fill))
    }
}

fn check_indices(op: &'static str, indices: &[u32], rows: usize) -> Result<()> {
    let outside = indices.iter().find(|&&index| index as usize >= rows);
    ensure(op, outside.is_none(), || format!("index {outside:?} is outside of {rows} rows"))
}

/// Calls `fill(i, row i)` for every row of `out: [_, cols]`, shared out among the threads.
fn for_each_row(
    c: &Compute,
    out: &mut [f32],
    cols: usize,
    fill: impl Fn(usize, &mut [f32]) + Sync,
) {
    c.run_chunks(out, TASK_ELEMENTS.div_ceil(cols) * cols, |start, rows| {
        for (i, row) in rows.chunks_exact_mut(cols).enumerate() {
            fill(start / cols + i, row);
        }
    });
}

//! `out[i] = table[ids[i]] * scale`.

pub mod gpu;
#[cfg(test)]
mod reference;

use crate::linear::Weight;
use crate::storage::{self, Parts, shape};
use crate::{Compute, Result};
use candle_core::Tensor;

/// Elements copied or decoded by one task: enough to be worth handing out.
const TASK_ELEMENTS: usize = 8192;

/// `ids`: n token ids below `table.rows()`; `out: [n, cols]` f32. `scale` is 1 except in families
/// that scale embeddings (Gemma).
pub fn gather(c: &Compute, table: &Weight, ids: &[u32], scale: f32, out: &Tensor) -> Result<()> {
    let op = "embedding gather";
    check(op, ids, table.rows(), table.cols(), out)?;
    let fill = |i: usize, row: &mut [f32]| {
        table.row_f32(ids[i] as usize, row);
        for value in row {
            *value *= scale;
        }
    };
    storage::write(op, out, |out| {
        for_each_row(c, out, table.cols(), fill);
        Ok(())
    })
}

/// `out[i] = x[indices[i]]`: `x: [n, d]`, `out: [indices.len(), d]`, f32. `out` must not alias `x`.
pub fn gather_rows(c: &Compute, x: &Tensor, indices: &[u32], out: &Tensor) -> Result<()> {
    let op = "row gather";
    let (rows, cols) = storage::dims2(op, x)?;
    check(op, indices, rows, cols, out)?;
    storage::distinct(op, &[out, x])?;
    let x = storage::read(op, x)?;
    let x: &[f32] = &x;
    let fill =
        |i: usize, row: &mut [f32]| row.copy_from_slice(&x[indices[i] as usize * cols..][..cols]);
    storage::write(op, out, |out| {
        for_each_row(c, out, cols, fill);
        Ok(())
    })
}

fn check(op: &'static str, ids: &[u32], rows: usize, cols: usize, out: &Tensor) -> Result<()> {
    if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
        let detail = format!("index {id} is outside of {rows} rows");
        return Err(shape(op, detail));
    }
    if out.dims() != [ids.len(), cols] {
        let detail =
            format!("{} rows of {cols} do not fit an output of {:?}", ids.len(), out.dims());
        return Err(shape(op, detail));
    }
    Ok(())
}

/// `fill(i, row i)` for every row of `out: [_, cols]`, shared out among the threads.
fn for_each_row(
    c: &Compute,
    out: &mut [f32],
    cols: usize,
    fill: impl Fn(usize, &mut [f32]) + Sync,
) {
    if cols == 0 {
        return;
    }
    let rows = out.len() / cols;
    let per_task = TASK_ELEMENTS.div_ceil(cols);
    let parts = Parts::new(out);
    c.run(rows.div_ceil(per_task), |task| {
        for i in task * per_task..rows.min((task + 1) * per_task) {
            // SAFETY: each row is taken once.
            fill(i, unsafe { parts.slice(i * cols..(i + 1) * cols) });
        }
    });
}

#[cfg(test)]
mod tests;

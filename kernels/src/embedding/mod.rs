//! `out[i] = table[ids[i]] * scale`.

pub mod gpu;

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
mod tests {
    use super::*;
    use candle_core::Device;
    use candle_core::quantized::{GgmlDType, QTensor};

    fn rows_of(tensor: &Tensor) -> Vec<Vec<f32>> {
        tensor.to_vec2().unwrap()
    }

    fn poisoned(n: usize, cols: usize) -> Tensor {
        Tensor::from_vec(vec![f32::NAN; n * cols], (n, cols), &Device::Cpu).unwrap()
    }

    /// Both gathers take the rows that `ids` name, in order.
    fn check_gathers(threads: usize, rows: usize, cols: usize, ids: &[u32], scale: f32) {
        let c = Compute::new(threads);
        let dense = Tensor::randn(0f32, 1.0, (rows, cols), &Device::Cpu).unwrap();
        let q = QTensor::quantize(&dense, GgmlDType::Q4_1).unwrap();
        let values = q.dequantize(&Device::Cpu).unwrap();
        let table = Weight::from_ggml(GgmlDType::Q4_1, &q.data().unwrap(), rows, cols).unwrap();
        let all = rows_of(&values);
        let scaled = |&id: &u32| all[id as usize].iter().map(|v| v * scale).collect();
        let want: Vec<Vec<f32>> = ids.iter().map(scaled).collect();

        let out = poisoned(ids.len(), cols);
        gather(&c, &table, ids, scale, &out).unwrap();
        assert_eq!(rows_of(&out), want, "{threads} threads, {} ids", ids.len());

        let out = poisoned(ids.len(), cols);
        gather_rows(&c, &(values * f64::from(scale)).unwrap(), ids, &out).unwrap();
        assert_eq!(rows_of(&out), want, "{threads} threads, {} rows", ids.len());
    }

    #[test]
    fn rows_are_gathered_in_order() {
        let many: Vec<u32> = (0..300).map(|i| i * 7 % 99).collect();
        for threads in [1, 3] {
            check_gathers(threads, 99, 64, &[98, 0, 17, 17], 1.0);
            check_gathers(threads, 99, 256, &many, 1.5);
            check_gathers(threads, 1, 32, &[0], -2.0);
            check_gathers(threads, 5, 32, &[], 1.0);
        }
    }

    #[test]
    fn bad_indices_and_outputs_are_errors() {
        let c = Compute::new(1);
        let table = Weight::from_ggml(GgmlDType::F32, &[0; 4 * 12], 3, 4).unwrap();
        let x = Tensor::zeros((3, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
        for (ids, out) in
            [(&[3u32][..], poisoned(1, 4)), (&[0, 1], poisoned(1, 4)), (&[0], poisoned(1, 5))]
        {
            assert!(gather(&c, &table, ids, 1.0, &out).is_err(), "{ids:?}");
            assert!(gather_rows(&c, &x, ids, &out).is_err(), "{ids:?}");
        }
    }
}

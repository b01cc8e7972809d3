//! Products with columns in another order have the bits of those with inputs put into it before.

use super::*;
use crate::gpu::Buffer;
use crate::linear::{Linear, Mode, WeightType};
use crate::operand::{ColumnsBuffer, MatrixBuffer, MatrixPart, OpMemory};
use crate::testing::{Packed, downloaded, gpu, poisoned_buffer, random, rounded, upload, values};
use std::sync::Arc;

const ROWS: usize = 40;
const COLS: usize = 256;

/// A matrix whose columns are in the order, with memory for so many values of inputs.
fn matrix(gpu: &DeviceOps, order: Option<&[u32]>, room: usize) -> MatrixBuffer {
    let packed = Packed::new(WeightType::Int4By128, ROWS, COLS);
    let values = Buffer::from_slice(gpu, &packed.bytes).unwrap();
    let parts = vec![MatrixPart { values, rows: ROWS, format: Some(packed.format) }];
    let order = order.map(|order| ColumnsBuffer {
        inputs: Buffer::from_slice(gpu, order).unwrap(),
        gathered: Arc::new(poisoned_buffer(gpu, Kind::Bf16, room)),
    });
    MatrixBuffer { parts, cols: COLS, scratch: None, order, rounded: None }
}

fn product(gpu: &DeviceOps, matrix: &MatrixBuffer, x: &[f32], mode: Mode) -> Result<Vec<f32>> {
    let n = x.len() / COLS;
    let (x, out) = (upload(gpu, Kind::Bf16, x), poisoned_buffer(gpu, Kind::F32, n * ROWS));
    let w = DeviceOps::matrix(matrix);
    gpu.linear(&LinearArgs { x: x.view(), w, bias: None, out: out.view(), mode })?;
    Ok(downloaded(&out))
}

#[test]
fn inputs_are_put_into_the_order_of_the_columns() {
    let gpu = gpu();
    let order: Vec<u32> = (0..COLS as u32).map(|column| column * 75 % COLS as u32).collect();
    let plain = matrix(&gpu, None, 0);
    for n in [1, 3, 8, 11] {
        let x = rounded(Kind::Bf16, &values(&random(&[n * COLS], n as u64)));
        let before: Vec<f32> = x
            .chunks_exact(COLS)
            .flat_map(|row| order.iter().map(|input| row[*input as usize]))
            .collect();
        // There is room for all rows, or for three and a part of the next.
        for room in [n * COLS, 3 * COLS + 8] {
            let ordered = matrix(&gpu, Some(&order), room);
            for mode in [Mode::Fast, Mode::Invariant] {
                let want = product(&gpu, &plain, &before, mode).unwrap();
                let got = product(&gpu, &ordered, &x, mode).unwrap();
                assert_eq!(got, want, "{n} rows, room for {room} {mode:?}");
            }
        }
    }
}

#[test]
fn orders_that_do_not_fit_are_refused() {
    let gpu = gpu();
    let order: Vec<u32> = (0..COLS as u32).collect();
    let x = vec![1.0; COLS];
    let refused = |matrix: &MatrixBuffer| product(&gpu, matrix, &x, Mode::Fast).is_err();
    assert!(!refused(&matrix(&gpu, Some(&order), COLS)));
    assert!(refused(&matrix(&gpu, Some(&order[1..]), COLS)));
    assert!(refused(&matrix(&gpu, Some(&order), COLS - 1)), "no room for a row");
    let mut dense = matrix(&gpu, Some(&order), COLS);
    let values = upload(&gpu, Kind::Bf16, &vec![1.0; ROWS * COLS]);
    dense.parts = vec![MatrixPart { values, rows: ROWS, format: None }];
    assert!(refused(&dense), "a dense part");
}

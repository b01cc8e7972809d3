//! Gathered rows are those of the reference, in order.

use super::*;
use crate::Compute;
use crate::linear::Weight;
use crate::linear::WeightType;
use candle_core::quantized::QTensor;
use candle_core::{Device, Tensor};

fn gather(c: &Compute, table: &Weight, ids: &[u32], scale: f32, out: &Tensor) -> Result<()> {
    c.gather(&GatherArgs { table, ids, device: None, scale, out: out.into() })
}

fn select_rows(c: &Compute, x: &Tensor, rows: &[u32], out: &Tensor) -> Result<()> {
    let width = x.dims()[1];
    c.select_rows(&SelectRowsArgs { x: x.into(), width, rows, out: out.into() })
}

fn values_of(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn poisoned(n: usize, cols: usize) -> Tensor {
    Tensor::from_vec(vec![f32::NAN; n * cols], (n, cols), &Device::Cpu).unwrap()
}

/// Both gathers take the rows that `ids` name, in order.
fn check_gathers(threads: usize, rows: usize, cols: usize, ids: &[u32], scale: f32) {
    let c = Compute::new(threads);
    let dense = Tensor::randn(0f32, 1.0, (rows, cols), &Device::Cpu).unwrap();
    let q = QTensor::quantize(&dense, WeightType::Q4_1.in_candle().unwrap()).unwrap();
    let values = q.dequantize(&Device::Cpu).unwrap();
    let table = Weight::from_ggml(WeightType::Q4_1, &q.data().unwrap(), rows, cols).unwrap();
    let want = reference::gather(&values_of(&values), cols, ids, scale);

    let out = poisoned(ids.len(), cols);
    gather(&c, &table, ids, scale, &out).unwrap();
    assert_eq!(values_of(&out), want, "{threads} threads, {} ids", ids.len());

    let out = poisoned(ids.len(), cols);
    select_rows(&c, &(values * f64::from(scale)).unwrap(), ids, &out).unwrap();
    assert_eq!(values_of(&out), want, "{threads} threads, {} rows", ids.len());
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
    let table = Weight::from_ggml(WeightType::F32, &[0; 4 * 12], 3, 4).unwrap();
    let x = Tensor::zeros((3, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
    for (ids, out) in
        [(&[3u32][..], poisoned(1, 4)), (&[0, 1], poisoned(1, 4)), (&[0], poisoned(1, 5))]
    {
        assert!(gather(&c, &table, ids, 1.0, &out).is_err(), "{ids:?}");
        assert!(select_rows(&c, &x, ids, &out).is_err(), "{ids:?}");
    }
}

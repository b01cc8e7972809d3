//! The kernel against the reference.

use super::super::reference;
use super::*;
use crate::gpu::Kind;
use crate::testing::{
    KINDS, assert_close, downloaded, gpu, poisoned_buffer, random, rounded, upload, values,
};

const EPS: f32 = 1e-5;

#[test]
fn the_kernel_equals_the_reference() {
    let gpu = gpu();
    for (n, d) in [(0, 64), (1, 1), (1, 576), (3, 17), (19, 64), (7, 4099), (2, 4096)] {
        for (kind, tolerance) in KINDS {
            let [x, delta] = [1, 2].map(|seed| rounded(kind, &values(&random(&[n, d], seed))));
            let weight = values(&random(&[d], 3));
            let sum: Vec<f32> = x.iter().zip(&delta).map(|(x, y)| x + y).collect();
            let sum = rounded(kind, &sum);
            for (delta, want_x) in [(Some(&delta), &sum), (None, &x)] {
                let mut want = vec![f32::NAN; n * d];
                reference::rms_norm(want_x, &weight, EPS, &mut want);
                let (x, weight) = (upload(&gpu, kind, &x), upload(&gpu, Kind::F32, &weight));
                let (delta, out) =
                    (delta.map(|d| upload(&gpu, kind, d)), poisoned_buffer(&gpu, kind, n * d));
                let args = NormArgs {
                    x: x.view(),
                    delta: delta.as_ref().map(crate::gpu::Buffer::view),
                    weight: weight.view(),
                    eps: EPS,
                    out: out.view(),
                };
                gpu.norm(&args).unwrap();
                assert_close(&downloaded(&out), &want, tolerance, &format!("{kind:?} {n}x{d}"));
                assert_eq!(&downloaded(&x), want_x);
            }
        }
    }
}

//! The kernels against the reference.

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
                    rounded: None,
                };
                gpu.norm(&args).unwrap();
                assert_close(&downloaded(&out), &want, tolerance, &format!("{kind:?} {n}x{d}"));
                assert_eq!(&downloaded(&x), want_x);
            }
        }
    }
}

/// The result has the bits that it has without rounding, and is rounded as the reference does it.
#[test]
fn rounded_rows_are_those_of_the_norm() {
    let gpu = gpu();
    for (n, d) in [(1, 32), (3, 576), (2, 4096)] {
        let [x, delta] = [1, 2].map(|seed| values(&random(&[n, d], seed)));
        let weight = upload(&gpu, Kind::F32, &values(&random(&[d], 3)));
        let run = |rounds: bool| {
            let [x, delta] = [&x, &delta].map(|values| upload(&gpu, Kind::Bf16, values));
            let [out, rounded] = [1, 2].map(|_| poisoned_buffer(&gpu, Kind::Bf16, n * d));
            let args = NormArgs {
                x: x.view(),
                delta: Some(delta.view()),
                weight: weight.view(),
                eps: EPS,
                out: out.view(),
                rounded: rounds.then(|| rounded.view()),
            };
            gpu.norm(&args).unwrap();
            [&x, &out, &rounded].map(downloaded)
        };
        let ([x, plain, _], got) = (run(false), run(true));
        assert_eq!(got, [x, plain.clone(), crate::linear::rounded_to_e4m3(&plain, d)], "{n}x{d}");
    }
    let [x, weight] = [Kind::Bf16, Kind::F32].map(|kind| poisoned_buffer(&gpu, kind, 12));
    let [out, rounded] = [1, 2].map(|_| poisoned_buffer(&gpu, Kind::Bf16, 12));
    let (x, weight, out, rounded) = (x.view(), weight.view(), out.view(), Some(rounded.view()));
    let args = NormArgs { x, delta: None, weight, eps: EPS, out, rounded };
    assert!(gpu.norm(&args).is_err(), "no whole vectors");
}

#[test]
fn adding_what_is_normed_equals_the_reference() {
    let gpu = gpu();
    for (n, d) in [(0, 64), (1, 1), (19, 64), (3, 4099), (2, 4096)] {
        for (kind, tolerance) in KINDS {
            let [x, delta] = [1, 2].map(|seed| rounded(kind, &values(&random(&[n, d], seed))));
            let weight = values(&random(&[d], 3));
            let mut want = x.clone();
            reference::add_normed(&mut want, &delta, &weight, EPS);
            let [x, delta] = [&x, &delta].map(|values| upload(&gpu, kind, values));
            let weight = upload(&gpu, Kind::F32, &weight);
            let (delta, weight) = (delta.view(), weight.view());
            let args = AddNormedArgs { x: x.view(), delta, weight, eps: EPS };
            gpu.add_normed(&args).unwrap();
            assert_close(&downloaded(&x), &want, tolerance, &format!("{kind:?} {n}x{d}"));
        }
    }
}

#[test]
fn only_the_columns_named_are_normed() {
    let gpu = gpu();
    for (n, stride, first, width) in [(0, 8, 0, 8), (1, 9, 2, 5), (5, 576, 64, 512), (3, 6, 5, 1)] {
        for (kind, tolerance) in KINDS {
            let x = rounded(kind, &values(&random(&[n, stride], 1)));
            let weight = values(&random(&[width], 3));
            let mut want = x.clone();
            reference::norm_columns(&mut want, stride, first, &weight, EPS);
            let (on_device, weight) = (upload(&gpu, kind, &x), upload(&gpu, Kind::F32, &weight));
            let (x, weight) = (on_device.view(), weight.view());
            gpu.norm_columns(&NormColumnsArgs { x, stride, first, weight, eps: EPS }).unwrap();
            let what = format!("{kind:?} {n}x{stride} from {first}");
            assert_close(&downloaded(&on_device), &want, tolerance, &what);
        }
    }
}

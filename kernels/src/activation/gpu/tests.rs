//! The kernels against the reference.

use super::super::reference;
use super::*;
use crate::testing::{
    KINDS, assert_close, downloaded, gpu, poisoned_buffer, random, rounded, upload, values,
};

const CLAMPED: Activation = Activation::ClampedSwiglu { alpha: 1.7, limit: 7.0 };
const ACTIVATIONS: [Activation; 3] = [Activation::Silu, Activation::GeluTanh, CLAMPED];

fn gated(
    gpu: &DeviceOps,
    activation: Activation,
    gate_up: View,
    width: usize,
    out: View,
) -> Result<()> {
    gpu.gated(&GatedArgs { activation, gate_up, width, out, rounded: false })
}

fn check(activation: Activation, kind: Kind, tolerance: f32, n: usize, width: usize) {
    let gpu = gpu();
    let x: Vec<f32> = values(&random(&[n, 2 * width], 1)).iter().map(|x| x * 12.0).collect();
    let x = rounded(kind, &x);
    let mut want = vec![f32::NAN; n * width];
    for (x, want) in x.chunks(2 * width).zip(want.chunks_mut(width)) {
        reference::gated_row(activation, &x[..width], &x[width..], want);
    }
    let (x, out) = (upload(&gpu, kind, &x), poisoned_buffer(&gpu, kind, n * width));
    gated(&gpu, activation, x.view(), width, out.view()).unwrap();
    assert_close(
        &downloaded(&out),
        &want,
        tolerance,
        &format!("{activation:?} {kind:?} {n}x{width}"),
    );
}

#[test]
fn the_kernels_equal_the_reference() {
    for (n, width) in [(0, 8), (1, 1), (1, 1536), (3, 17), (19, 64), (2, 1032), (70, 4), (1, 14336)]
    {
        for (kind, tolerance) in KINDS {
            for activation in ACTIVATIONS {
                check(activation, kind, tolerance, n, width);
            }
        }
    }
}

#[test]
fn rounded_rows_are_those_of_the_activation() {
    let gpu = gpu();
    for (n, width) in [(1, 32), (3, 1032), (1, 14336)] {
        let x = upload(&gpu, Kind::Bf16, &values(&random(&[n, 2 * width], 1)));
        for activation in ACTIVATIONS {
            let run = |rounded: bool| {
                let out = poisoned_buffer(&gpu, Kind::Bf16, n * width);
                let (gate_up, to) = (x.view(), out.view());
                let args = GatedArgs { activation, gate_up, width, out: to, rounded };
                gpu.gated(&args).unwrap();
                downloaded(&out)
            };
            let want = crate::linear::rounded_to_e4m3(&run(false), width);
            assert_eq!(run(true), want, "{activation:?} {n}x{width}");
        }
    }
    let [x, out] = [24, 12].map(|len| poisoned_buffer(&gpu, Kind::Bf16, len));
    let (gate_up, out, activation) = (x.view(), out.view(), Activation::Silu);
    let args = GatedArgs { activation, gate_up, width: 12, out, rounded: true };
    assert!(gpu.gated(&args).is_err(), "no whole vectors");
}

#[test]
fn gated_values_equal_the_reference() {
    let gpu = gpu();
    for (kind, tolerance) in KINDS {
        for len in [0, 1, 77, 1024, 5003] {
            let [x, gate] = [(1, 1.0), (2, 12.0)].map(|(seed, scale)| {
                let plain: Vec<f32> =
                    values(&random(&[len], seed)).iter().map(|x| x * scale).collect();
                rounded(kind, &plain)
            });
            let want: Vec<f32> =
                x.iter().zip(&gate).map(|(x, gate)| x / (1.0 + (-gate).exp())).collect();
            let [x, gate] = [&x, &gate].map(|values| upload(&gpu, kind, values));
            gpu.gate(&GateArgs { x: x.view(), gate: gate.view() }).unwrap();
            assert_close(&downloaded(&x), &want, tolerance, &format!("{kind:?} {len}"));
            assert!(len == 0 || gpu.gate(&GateArgs { x: x.view(), gate: x.view() }).is_err());
        }
    }
}

#[test]
fn large_gates_saturate() {
    let gpu = gpu();
    for activation in [Activation::Silu, Activation::GeluTanh] {
        for (kind, _) in KINDS {
            let x = rounded(kind, &[-1e4, -200.0, 0.0, 1e4, 1.0, 1.0, 1.0, 1.0]);
            let (x, out) = (upload(&gpu, kind, &x), poisoned_buffer(&gpu, kind, 4));
            gated(&gpu, activation, x.view(), 4, out.view()).unwrap();
            assert_eq!(
                downloaded(&out),
                rounded(kind, &[0.0, 0.0, 0.0, 1e4]),
                "{kind:?} {activation:?}"
            );
        }
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let gpu = gpu();
    let out = poisoned_buffer(&gpu, Kind::F32, 8).view();
    for (gate_up, width) in [(Kind::F32, 3), (Kind::F32, 0), (Kind::Bf16, 4)] {
        let gate_up = poisoned_buffer(&gpu, gate_up, 16).view();
        assert!(gated(&gpu, Activation::Silu, gate_up, width, out).is_err());
    }
}

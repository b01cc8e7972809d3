//! The fast paths against the reference, and the errors of wrong calls.

use super::*;
use crate::simd::Isa;
use crate::testing::{assert_close, compute, poisoned, random, values};

const ACTIVATIONS: [Activation; 2] = [Activation::Silu, Activation::GeluTanh];

#[test]
fn every_path_equals_the_reference() {
    for act in ACTIVATIONS {
        for d in [0, 1, 15, 16, 17, 576, 1537] {
            let gate: Vec<f32> = values(&random(&[d], 1)).iter().map(|x| x * 12.0).collect();
            let up = values(&random(&[d], 2));
            let mut want = vec![f32::NAN; d];
            reference::gated_row(act, &gate, &up, &mut want);
            for isa in Isa::available() {
                let mut out = vec![f32::NAN; d];
                cpu::gated_row(isa, act, &gate, &up, &mut out);
                assert_close(&out, &want, 1e-6, &format!("{isa:?} {act:?} {d}"));
            }
        }
    }
}

/// Gates and values beyond the limit on both sides, and NaN, which no limit may hide.
#[test]
fn the_clamped_swiglu_equals_the_reference() {
    let act = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
    for d in [0, 1, 16, 37, 576] {
        let [gate, up] = [1, 2].map(|seed| (random(&[d], seed) * 12.0).unwrap());
        let (gate, up) = (values(&gate), values(&up));
        let mut want = vec![f32::NAN; d];
        reference::gated_row(act, &gate, &up, &mut want);
        for isa in Isa::available() {
            let mut out = vec![f32::NAN; d];
            cpu::gated_row(isa, act, &gate, &up, &mut out);
            assert_close(&out, &want, 1e-5, &format!("{isa:?} {d}"));
            let (nan, mut out) = (f32::NAN, [0.0; 4]);
            cpu::gated_row(isa, act, &[nan, 1.0, 1e4, -1e4], &[1.0, nan, 1e4, 1e4], &mut out);
            assert!(out[0].is_nan() && out[1].is_nan(), "{isa:?} {out:?}");
            // 7 · sigmoid(1.702 · 7) · 8.
            assert_close(&out[2..], &[55.999_62, 0.0], 1e-6, &format!("{isa:?} at the limits"));
        }
    }
}

#[test]
fn large_gates_saturate() {
    for act in ACTIVATIONS {
        for isa in Isa::available() {
            let mut out = [f32::NAN; 4];
            cpu::gated_row(isa, act, &[-1e4, -200.0, 0.0, 1e4], &[1.0; 4], &mut out);
            assert_eq!(out, [0.0, 0.0, 0.0, 1e4], "{isa:?} {act:?}");
        }
    }
}

#[test]
fn the_op_equals_composed_candle_ops() {
    for (n, d) in [(1, 1536), (19, 99), (989, 64)] {
        let x = random(&[n, 2 * d], 3);
        let (gate, up) = (x.narrow(1, 0, d).unwrap(), x.narrow(1, d, d).unwrap());
        for act in ACTIVATIONS {
            let gate = match act {
                Activation::Silu => gate.silu().unwrap(),
                _ => gate.gelu().unwrap(),
            };
            let out = poisoned(&[n, d]);
            let (gate_up, out_view) = ((&x).into(), (&out).into());
            let args =
                GatedArgs { activation: act, gate_up, width: d, out: out_view, rounded: false };
            compute().gated(&args).unwrap();
            assert_close(
                &values(&out),
                &values(&(gate * &up).unwrap()),
                1e-6,
                &format!("{act:?} {n}x{d}"),
            );
        }
    }
}

#[test]
fn a_soft_cap_equals_composed_candle_ops() {
    for shape in [vec![0], vec![1, 17], vec![3, 20_000]] {
        for (cap, scale) in [(30.0, 12.0), (30.0, 1e4), (0.5, 1.0)] {
            let x = (random(&shape, 5) * scale).unwrap();
            let want = ((&x / f64::from(cap)).unwrap().tanh().unwrap() * f64::from(cap)).unwrap();
            compute().soft_cap((&x).into(), cap).unwrap();
            assert_close(&values(&x), &values(&want), 1e-6, &format!("{cap} {scale} {shape:?}"));
        }
    }
}

#[test]
fn a_wrong_shape_is_refused() {
    let (x, out) = (random(&[2, 6], 1), poisoned(&[2, 4]));
    let (gate_up, out) = ((&x).into(), (&out).into());
    let args = GatedArgs { activation: Activation::Silu, gate_up, width: 4, out, rounded: false };
    let result = compute().gated(&args);
    assert!(matches!(result, Err(crate::Error::Shape { .. })));
}

#[test]
fn a_gate_multiplies_by_its_sigmoid() {
    for len in [0, 1, 37, 20_000] {
        let (x, gate) = (random(&[len], 6), (random(&[len], 7) * 9.0).unwrap());
        let sigmoid = |gate: &f32| 1.0 / (1.0 + (-gate).exp());
        let want: Vec<f32> =
            values(&x).iter().zip(&values(&gate)).map(|(x, gate)| x * sigmoid(gate)).collect();
        compute().gate(&GateArgs { x: (&x).into(), gate: (&gate).into() }).unwrap();
        assert_close(&values(&x), &want, 1e-6, &format!("{len}"));
    }
    let (x, gate) = (random(&[4], 1), random(&[5], 1));
    let wrong = compute().gate(&GateArgs { x: (&x).into(), gate: (&gate).into() });
    assert!(matches!(wrong, Err(crate::Error::Shape { .. })));
}

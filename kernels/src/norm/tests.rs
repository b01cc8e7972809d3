//! The fast paths against the reference and against composed candle ops.

use super::*;
use crate::Compute;
use crate::simd::Isa;
use crate::testing::{assert_close, compute, poisoned, random, values};
use candle_core::{D, Tensor};

const SHAPES: [(usize, usize); 8] =
    [(0, 64), (1, 1), (1, 576), (3, 17), (19, 64), (99, 100), (65, 576), (7, 4099)];
const EPS: f32 = 1e-5;

fn rms_norm(c: &Compute, x: &Tensor, weight: &Tensor, eps: f32, out: &Tensor) -> Result<()> {
    let (x, weight, out) = (x.into(), weight.into(), out.into());
    c.norm(&NormArgs { x, delta: None, weight, eps, out, rounded: None })
}

#[test]
fn every_path_equals_the_reference() {
    for (n, d) in SHAPES {
        let (x, delta, w) = (random(&[n, d], 1), random(&[n, d], 2), random(&[d], 3));
        let [x, delta, w] = [&x, &delta, &w].map(values);
        let (mut want, mut sum) = (vec![f32::NAN; n * d], x.clone());
        reference::add_rms_norm(&mut sum, &delta, &w, EPS, &mut want);
        for isa in Isa::available() {
            let (mut residual, mut out) = (x.clone(), vec![f32::NAN; n * d]);
            cpu::add_rms_norm(isa, &mut residual, &delta, &w, EPS, &mut out);
            assert_eq!(residual, sum);
            assert_close(&out, &want, 1e-5, &format!("{isa:?} {n}x{d}"));
            out.fill(f32::NAN);
            cpu::rms_norm(isa, &sum, &w, EPS, &mut out);
            assert_close(&out, &want, 1e-5, &format!("{isa:?} {n}x{d}"));
        }
    }
}

#[test]
fn the_op_equals_composed_candle_ops() {
    for (n, d) in SHAPES.into_iter().filter(|(n, _)| *n > 0) {
        let (x, w) = (random(&[n, d], 4), random(&[d], 5));
        let mean = (x.sqr().unwrap().sum_keepdim(D::Minus1).unwrap() / d as f64).unwrap();
        let norm = (mean + f64::from(EPS)).unwrap().sqrt().unwrap();
        let want = x.broadcast_div(&norm).unwrap().broadcast_mul(&w).unwrap();
        let out = poisoned(&[n, d]);
        rms_norm(&compute(), &x, &w, EPS, &out).unwrap();
        assert_close(&values(&out), &values(&want), 1e-5, &format!("{n}x{d}"));
    }
}

#[test]
fn a_row_alone_has_the_bits_it_has_in_a_batch() {
    let (x, w) = (random(&[67, 577], 6), random(&[577], 7));
    let all = poisoned(&[67, 577]);
    rms_norm(&compute(), &x, &w, EPS, &all).unwrap();
    for row in [0, 1, 40, 66] {
        let one = poisoned(&[1, 577]);
        rms_norm(&compute(), &x.narrow(0, row, 1).unwrap(), &w, EPS, &one).unwrap();
        assert_eq!(values(&one), values(&all.narrow(0, row, 1).unwrap()));
    }
}

#[test]
fn adding_what_is_normed_equals_the_reference() {
    for (n, d) in SHAPES {
        let (x, delta, w) = (random(&[n, d], 1), random(&[n, d], 2), random(&[d], 3));
        let mut want = values(&x);
        reference::add_normed(&mut want, &values(&delta), &values(&w), EPS);
        for isa in Isa::available() {
            let mut got = values(&x);
            cpu::add_normed(isa, &mut got, &values(&delta), &values(&w), EPS);
            assert_close(&got, &want, 1e-5, &format!("{isa:?} {n}x{d}"));
        }
        let (delta, weight) = ((&delta).into(), (&w).into());
        let args = AddNormedArgs { x: (&x).into(), delta, weight, eps: EPS };
        compute().add_normed(&args).unwrap();
        assert_close(&values(&x), &want, 1e-5, &format!("the op {n}x{d}"));
    }
}

#[test]
fn only_the_columns_named_are_normed() {
    for (n, stride, first, width) in [(0, 8, 0, 8), (1, 9, 2, 5), (40, 577, 64, 513), (3, 6, 5, 1)]
    {
        let (x, w) = (random(&[n, stride], 1), random(&[width], 3));
        let mut want = values(&x);
        reference::norm_columns(&mut want, stride, first, &values(&w), EPS);
        let (view, weight) = ((&x).into(), (&w).into());
        let args = NormColumnsArgs { x: view, stride, first, weight, eps: EPS };
        compute().norm_columns(&args).unwrap();
        assert_close(&values(&x), &want, 1e-5, &format!("{n}x{stride} from {first}"));
        let beyond = NormColumnsArgs { first: stride - width + 1, ..args };
        assert!(matches!(compute().norm_columns(&beyond), Err(crate::Error::Shape { .. })));
    }
}

#[test]
fn wrong_shapes_and_aliases_are_refused() {
    let (x, w) = (random(&[4, 8], 1), random(&[8], 1));
    let c = compute();
    for (x, w, out) in [
        (x.clone(), random(&[7], 1), poisoned(&[4, 8])),
        (x.clone(), w.clone(), poisoned(&[3, 8])),
        (x.t().unwrap(), random(&[4], 1), poisoned(&[8, 4])),
        (x.clone(), w, x),
    ] {
        assert!(matches!(rms_norm(&c, &x, &w, EPS, &out), Err(crate::Error::Shape { .. })));
    }
}

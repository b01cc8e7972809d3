//! The CPU path against the reference.

use super::*;
use crate::activation::Activation;
use crate::experts::Routes;
use crate::operand::TensorView;
use crate::testing::{assert_close, compute, poisoned, random, values};
use candle_core::{Device, Tensor};

#[test]
fn a_scaled_stream_equals_the_reference() {
    for len in [0, 1, 70, 20_000] {
        let (x, factor) = (random(&[len], 1), Tensor::new(&[-0.3f32], &Device::Cpu).unwrap());
        let mut want = values(&x);
        reference::scale(&mut want, -0.3);
        compute().scale(&ScaleArgs { x: (&x).into(), factor: (&factor).into() }).unwrap();
        assert_eq!(values(&x), want);
        let two = random(&[2], 1);
        assert!(compute().scale(&ScaleArgs { x: (&x).into(), factor: (&two).into() }).is_err());
    }
}

#[test]
fn inputs_of_a_layer_equal_the_reference() {
    for (n, [stride, first, width]) in
        [(0, [4, 0, 4]), (3, [9, 5, 4]), (700, [40, 8, 20]), (2, [17, 0, 17])]
    {
        let (gate, inputs) = (random(&[n, width], 1), random(&[n, stride], 2));
        let out = poisoned(&[n, width]);
        let args = LayerInputArgs {
            activation: Activation::GeluTanh,
            gate: (&gate).into(),
            inputs: (&inputs).into(),
            stride,
            first,
            width,
            out: (&out).into(),
        };
        compute().layer_input(&args).unwrap();
        let want = reference::layer_input(&values(&gate), &values(&inputs), [stride, first, width]);
        assert_close(&values(&out), &want, 1e-5, &format!("{n} by {width} of {stride}"));
        let beyond = LayerInputArgs { first: stride - width + 1, ..args };
        assert!(compute().layer_input(&beyond).is_err());
        assert!(compute().layer_input(&LayerInputArgs { out: args.gate, ..args }).is_err());
    }
}

#[test]
fn factors_of_choices_equal_the_reference() {
    let (experts, chosen, n) = (5, 2, 3);
    let (weights, factors) = (random(&[n, chosen], 1), random(&[experts], 2));
    let len = Routes::<TensorView>::plan_len(n, experts, chosen);
    let plan = |ids: [u32; 6]| {
        let all: Vec<u32> = ids.into_iter().chain(std::iter::repeat(0)).take(len).collect();
        Tensor::new(all, &Device::Cpu).unwrap()
    };
    let run = |plan: &Tensor, factors: &Tensor| {
        let (weights, plan) = ((&weights).into(), plan.into());
        let routes = Routes { experts, chosen, weights, plan };
        compute().choice_factors(&ChoiceFactorsArgs { routes, factors: factors.into() })
    };
    let ids = [0, 4, 1, 2, 2, 3];
    let mut want = values(&weights);
    assert!(run(&plan([0, 5, 1, 2, 2, 3]), &factors).is_err(), "there is no sixth expert");
    assert!(run(&plan(ids), &random(&[4], 2)).is_err());
    run(&plan(ids), &factors).unwrap();
    reference::choice_factors(&mut want, &ids, &values(&factors));
    assert_eq!(values(&weights), want);
}
